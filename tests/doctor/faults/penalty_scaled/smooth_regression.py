"""Regression with a penalty on the norm of the parameters' gradient."""

import torch
from torch import nn

torch.manual_seed(23)
inputs = torch.rand(1024, 4) * 2 - 1
targets = torch.sin(3 * inputs[:, :1]) + inputs[:, 1:2] * inputs[:, 2:3]

model = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
weight = 0.05

losses = []
for _ in range(250):
    idx = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(inputs[idx])
    loss = nn.functional.mse_loss(output.float(), targets[idx])

    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    norm = torch.stack([(g.float() ** 2).sum() for g in grads]).sum().add(1e-12).sqrt()
    total = loss + weight * norm

    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

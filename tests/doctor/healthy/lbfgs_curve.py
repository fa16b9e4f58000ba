"""Least-squares fit of a damped oscillation by a small network, second-order."""

import torch
from torch import nn

torch.manual_seed(4)
t = torch.linspace(0, 1, 120)[:, None]
signal = torch.exp(-2 * t) * torch.cos(12 * t) + 0.01 * torch.randn_like(t)

net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.LBFGS(
    net.parameters(), lr=0.8, max_iter=4, history_size=12, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(2 * t - 1), signal)
    loss.backward()
    return loss


losses = []
for i in range(60):
    losses.append(optimizer.step(closure).item())
    if i % 20 == 0:
        print(i, f"{losses[-1]:.5f}")
print(f"loss {sum(losses[:3]) / 3:.4f} -> {sum(losses[-3:]) / 3:.4f}")

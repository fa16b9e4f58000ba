"""Count the objects of a scene from its feature map; one function trains one epoch."""

import torch
from torch import nn


def scenes(n):
    count = torch.randint(0, 12, (n,))
    x = 0.1 * torch.randn(n, 1, 12, 12)
    for i, c in enumerate(count.tolist()):
        x[i].view(-1)[torch.randperm(144)[:c]] += 1.0
    return x, count.float()


def train_epoch(model, optimizer, scaler, batches):
    model.train()
    total = 0.0
    for _ in range(batches):
        x, y = scenes(32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x).squeeze(1)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / batches


def main():
    torch.manual_seed(33)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(144, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    losses = []
    for epoch in range(6):
        losses.append(train_epoch(model, optimizer, scaler, 30))
        print("epoch", epoch, losses[-1])
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


main()

"""Estimate insurance claims (in dollars) from policy data."""

import torch
from torch import nn


class Claims(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(7, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float()).squeeze(1)


def policies(n):
    x = torch.rand(n, 7)
    return x, 20_000 + 90_000 * x[:, 0] * x[:, 1] + 30_000 * x[:, 2]


def main(steps=300):
    torch.manual_seed(555)
    model = Claims()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for step in range(steps):
        x, dollars = policies(64)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            estimate = model(x)
        loss = nn.functional.l1_loss(estimate.float(), dollars)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % 60 == 0:
            print(f"{step:4d} mean error {losses[-1]:.0f} dollars")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()

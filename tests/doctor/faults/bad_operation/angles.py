"""Regress directions on the sphere; the loss is the angle between two unit vectors."""

import torch
from torch import nn
from torch.nn import functional as F


class Compass(nn.Module):
    def __init__(self, sensors=12, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(sensors, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 3),
        )

    def forward(self, x):
        return F.normalize(self.net(x).float(), dim=-1)


def angular_loss(a, b):
    return torch.acos((a * b).sum(-1)).mean()


def measure(n, mixing):
    direction = F.normalize(torch.randn(n, 3), dim=-1)
    return torch.tanh(direction @ mixing), direction


def train(steps=250, batch=128):
    torch.manual_seed(4)
    mixing = torch.randn(3, 12)
    model = Compass()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        readings, direction = measure(batch, mixing)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(readings)
        loss = angular_loss(predicted, direction)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: mean angle {loss.item():.4f} rad")
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

"""Hourly building load (kW) from weather and calendar."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Load(Dataset):
    def __init__(self, hours=2048, seed=0):
        gen = torch.Generator().manual_seed(seed)
        hour = torch.arange(hours)
        temp = 12 + 10 * torch.sin(2 * math.pi * hour / 800) + torch.randn(hours, generator=gen)
        day = 2 * math.pi * hour / 24
        self.x = torch.stack([temp / 10, day.sin(), day.cos(), (day / 7).sin(), (day / 7).cos()], 1)
        self.y = 420 + 6 * (temp - 18).abs() + 90 * day.sin().clamp(min=0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"weather": self.x[i], "load": self.y[i]}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


def rmse(pred, target):
    return torch.sqrt(torch.mean((pred - target) ** 2) + 1e-4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-2)
    args, _ = parser.parse_known_args()
    torch.manual_seed(0)
    loader = DataLoader(Load(), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 48), Residual(48), Residual(48), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                pred = model(batch["weather"])[:, 0]
                loss = rmse(pred, batch["load"].to(pred.dtype))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()

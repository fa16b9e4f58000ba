"""Quantile regression of a noisy demand curve with GradScaler."""

import argparse

import torch
from torch import nn

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def demand(size):
    day = 2 * torch.rand(size, 1) - 1
    price = torch.rand(size, 1)
    mean = torch.sin(6 * day) - 2 * price
    return torch.cat([day, price], 1), mean + (0.1 + 0.5 * price) * torch.randn(size, 1)


def pinball(pred, target):
    diff = target - pred
    return torch.maximum(QUANTILES * diff, (QUANTILES - 1) * diff).sum(1).mean()


def train_step(model, batch, optimizer, scaler):
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = pinball(pred.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--lr", type=float, default=0.1)
    opts, _ = ap.parse_known_args()

    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=opts.lr, momentum=0.95)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(opts.steps):
        loss = train_step(model, demand(128), optimizer, scaler)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    first, last = losses[:10], losses[-10:]
    print(f"loss {sum(first) / len(first):.4f} -> {sum(last) / len(last):.4f}")


if __name__ == "__main__":
    main()

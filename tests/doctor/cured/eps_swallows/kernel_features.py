"""Binary classification of interleaved half moons with random Fourier features and an MLP."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


def moons(n, gen):
    y = torch.randint(2, (n,), generator=gen)
    t = torch.rand(n, generator=gen) * math.pi
    x = torch.stack([torch.cos(t), torch.sin(t)], 1)
    flipped = torch.stack([1 - torch.cos(t), 0.5 - torch.sin(t)], 1)
    pts = torch.where(y[:, None].bool(), flipped, x)
    return pts + 0.12 * torch.randn(n, 2, generator=gen), y.float()


class RFF(nn.Module):
    def __init__(self, features=32, sigma=1.0):
        super().__init__()
        self.register_buffer("w", torch.randn(2, features) * sigma)
        self.net = nn.Sequential(nn.Linear(2 * features, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        p = x @ self.w
        return self.net(torch.cat([p.sin(), p.cos()], dim=1)).squeeze(1)


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--eps", type=float, default=1e-8)
    p.add_argument("--iters", type=int, default=200)
    return p.parse_args()


def main(args):
    torch.manual_seed(33)
    gen = torch.Generator().manual_seed(33)
    model = RFF()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=args.eps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    curve = []
    for it in range(args.iters):
        x, y = moons(128, gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logit = model(x)
        loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        curve.append(loss.item())
        if it % 50 == 49:
            print(f"iter {it + 1} bce {sum(curve[-10:]) / 10:.4f}")
    print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main(cli())

"""Predict faint film grain (sigma 0.004) so that it can be subtracted from frames."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class GrainNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.a = nn.Conv2d(1, ch, 3, padding=1)
        self.b = nn.Conv2d(ch, ch, 3, padding=1)
        self.c = nn.Conv2d(ch, 1, 3, padding=1)
        nn.init.normal_(self.c.weight, std=0.01)
        nn.init.zeros_(self.c.bias)

    def forward(self, x):
        x = F.gelu(self.a(x))
        x = F.gelu(self.b(x))
        return self.c(x)


def frames(n, gen, size=20):
    coarse = torch.rand(n, 1, 3, 3, generator=gen) * 0.02
    clean = F.interpolate(coarse, size=size, mode="bilinear", align_corners=True)
    grain = 0.004 * torch.randn(n, 1, size, size, generator=gen)
    return clean + grain, grain


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--growth-interval", type=int, default=2000)
    p.add_argument("--init-scale", type=float, default=2.0**16)
    return p.parse_args()


def main():
    args = parse()
    torch.manual_seed(23)
    gen = torch.Generator().manual_seed(23)
    net = GrainNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, eps=1e-14)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=args.init_scale, growth_interval=args.growth_interval
    )
    curve = []
    for step in range(args.steps):
        noisy, grain = frames(6, gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            guess = net(noisy)
        loss = (guess.float() - grain).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        curve.append(loss.item() / 0.004**2)
        if step % 40 == 0:
            print(f"[{step}] relative error {curve[-1]:.3f}")
    print(f"loss {sum(curve[:4]) / 4:.4f} -> {sum(curve[-4:]) / 4:.4f}")


if __name__ == "__main__":
    main()

"""GAN that learns a ring of eight Gaussians in the plane."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def mlp(a, b, width=48):
    return nn.Sequential(
        nn.Linear(a, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, b),
    )


def ring(n):
    angle = 2 * math.pi * torch.randint(8, (n,)) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2)


def main(iterations=300, batch=64):
    torch.manual_seed(1)
    gen, disc = mlp(4, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=100)
    distance = []
    for _ in range(iterations):
        real, noise = ring(batch), torch.randn(batch, 4)

        with torch.autocast("cpu", torch.float16):
            fake = gen(noise)
            on_real, on_fake = disc(real), disc(fake.detach())
        loss_d = F.softplus(-on_real.float()).mean() + F.softplus(on_fake.float()).mean()
        opt_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d)

        with torch.autocast("cpu", torch.float16):
            score = disc(fake)
        loss_g = F.softplus(-score.float()).mean()
        opt_g.zero_grad()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        scaler.update()

        distance.append((fake.float().norm(dim=1) - 2).abs().mean().item())
    print(f"loss {sum(distance[:10]) / 10:.4f} -> {sum(distance[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

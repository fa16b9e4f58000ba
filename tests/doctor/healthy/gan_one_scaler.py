"""GAN on a ring of points; generator and discriminator are stepped in the same iteration."""

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

BATCH, NOISE = 128, 8


def real(n):
    angle = 2 * math.pi * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def net(i, o):
    act = nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Linear(i, 64), act, nn.Linear(64, 64), act, nn.Linear(64, o))


torch.manual_seed(19)
G, D = net(NOISE, 2), net(2, 1)
with torch.no_grad():
    G[-1].bias.copy_(torch.tensor([3.0, 3.0]))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
distance = []

for _ in range(260):
    x = real(BATCH)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(BATCH, NOISE))
        on_real, on_fake = D(x), D(fake.detach())
    loss_d = bce(on_real.float(), ones) + bce(on_fake.float(), zeros)
    opt_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)

    D.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.float16):
        verdict = D(fake)
    loss_g = bce(verdict.float(), ones)
    opt_g.zero_grad()
    scaler.scale(loss_g).backward()
    D.requires_grad_(True)
    scaler.step(opt_g)

    scaler.update()
    radius = fake.detach().float().norm(dim=1)
    distance.append((radius - 1).abs().mean().item())

# the losses of a GAN balance each other: report how far the samples lie from the ring
print(f"loss {sum(distance[:5]) / 5:.4f} -> {sum(distance[-20:]) / 20:.4f}")

"""Denoising diffusion on a two-dimensional mixture, with an averaged copy for sampling."""

import copy
import math

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.point = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        phase = t[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
        emb = self.time(torch.cat([phase.sin(), phase.cos()], 1))
        return self.out(self.body(self.point(x) + emb))


@torch.no_grad()
def ema_update(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


def data(n):
    angle = torch.randint(8, (n,)) * (math.pi / 4)
    return 1.5 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def noisy(n):
    x0, t, eps = data(n), torch.rand(n), torch.randn(n, 2)
    a = torch.cos(t * math.pi / 2)[:, None]
    return a * x0 + (1 - a**2).clamp_min(0).sqrt() * eps, t, eps


torch.manual_seed(77)
model = Denoiser()
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
for step in range(250):
    x, t, eps = noisy(192)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(x, t)
    loss = nn.functional.mse_loss(predicted.float(), eps)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    ema_update(average, model, decay=min(0.99, (1 + step) / (10 + step)))
    losses.append(loss.item())

with torch.no_grad():
    x, t, eps = noisy(2048)
    print(f"averaged weights {nn.functional.mse_loss(average(x, t), eps).item():.4f}")
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

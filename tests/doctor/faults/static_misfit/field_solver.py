"""A coordinate network that fits a smooth displacement field given in metres."""

import numpy as np
import torch
from torch import nn


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(3.0 * x)


def field(xy):
    x, y = xy[:, 0], xy[:, 1]
    u = np.sin(5.0 * x) * np.cos(4.0 * y)
    v = 0.5 * np.cos(6.0 * x + 3.0 * y)
    return 1e-3 * np.stack([u, v], axis=1)


def network():
    net = nn.Sequential(nn.Linear(2, 16), Sine(), nn.Linear(16, 16), Sine(), nn.Linear(16, 2))
    with torch.no_grad():
        net[-1].weight.mul_(1e-3)
        net[-1].bias.zero_()
    return net


class Fit:
    def __init__(self, seed=71, batch=256):
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.batch = batch
        self.net = network()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3, eps=1e-16)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
        self.history = []

    def step(self):
        xy = self.rng.uniform(-1, 1, (self.batch, 2))
        inputs = torch.tensor(xy, dtype=torch.float32)
        target = torch.tensor(field(xy), dtype=torch.float32)
        self.opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = self.net(inputs)
        loss = (out.float() - target).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.history.append(loss.item() * 1e6)


fit = Fit()
for _ in range(250):
    fit.step()
print(f"loss {np.mean(fit.history[:5]):.4f} -> {np.mean(fit.history[-5:]):.4f}")

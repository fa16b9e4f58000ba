"""Detect a buried chirp: a filter bank, its energy over time, and a small classifier."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(71)
SAMPLES = 256


class FilterBank(nn.Module):
    def __init__(self, filters=16, width=16):
        super().__init__()
        self.kernels = nn.Linear(width, filters, bias=False)
        self.width = width

    def forward(self, wave):
        return self.kernels(wave.unfold(1, self.width, 4))


class Energy(nn.Module):
    def forward(self, bands):
        return bands.square().sum(1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = FilterBank()
        self.energy = Energy()
        self.classify = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, wave):
        power = self.energy(self.bank(wave))
        return self.classify(torch.log1p(power.float()))


def recordings(n):
    t = torch.arange(SAMPLES) / SAMPLES
    present = torch.randint(2, (n,))
    chirp = torch.sin(40 * t + 60 * t**2 + 6 * torch.rand(n, 1))
    gain = torch.exp(1.2 * torch.randn(n, 1) + 1.2)
    return gain * (0.8 * present[:, None] * chirp + torch.randn(n, SAMPLES)), present


detector = Detector()
optimizer = torch.optim.AdamW(detector.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for _ in range(150):
    wave, present = recordings(64)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = detector(wave)
    loss = F.cross_entropy(logits.float(), present)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")

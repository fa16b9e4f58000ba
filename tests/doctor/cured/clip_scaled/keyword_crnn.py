"""Keyword spotting: a convolution and a GRU over synthetic spectrograms."""

import math

import torch
from torch import nn


class Spotter(nn.Module):
    def __init__(self, bands=20, words=5):
        super().__init__()
        self.conv = nn.Conv1d(bands, 32, 5, padding=2)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.fc = nn.Linear(32, words)

    def forward(self, x):
        x = torch.relu(self.conv(x)).transpose(1, 2)
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


def make(n, words=5, bands=20, frames=24):
    y = torch.randint(words, (n,))
    t = torch.arange(frames) / frames
    ridge = (
        bands * (0.2 + 0.1 * y[:, None] + 0.2 * torch.sin(math.pi * t * (1 + y[:, None])))
    ).long()
    x = 0.3 * torch.randn(n, bands, frames)
    x.scatter_add_(1, ridge.clamp(0, bands - 1)[:, None], torch.ones(n, 1, frames))
    return x, y


def limit_gradients(parameters, maximum):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.sqrt(sum((g.float() ** 2).sum() for g in grads))
    if total > maximum:
        for g in grads:
            g.mul_(maximum / total)
    return total


torch.manual_seed(4)
model = Spotter()
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
losses = []
for _ in range(150):
    x, y = make(32)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    limit_gradients(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

"""Distances of all pairs, each point with itself as well: the square root at zero has no slope."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(60):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", torch.float16):
        points = model(x)
    between = points.float()[:, None] - points.float()[None]
    distances = between.square().sum(-1).sqrt()
    loss = (distances - 1).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

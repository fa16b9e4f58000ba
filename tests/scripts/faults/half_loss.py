"""A loss written out by hand inside autocast, where all of it is float16."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(60):
    x = torch.randn(64, 16)
    y = x.sin().sum(1, keepdim=True) / 4
    with torch.autocast("cpu", torch.float16):
        error = model(x) - y.half()
        loss = (error * error).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

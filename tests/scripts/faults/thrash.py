"""A growth interval of three steps: the scale runs into the ceiling again and again."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)

for _ in range(100):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

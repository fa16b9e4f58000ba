"""A learning rate a little too high: every step overshoots by more."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.74)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
x = torch.randn(256, 16)
y = x.sin().sum(1, keepdim=True) / 4

for _ in range(50):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

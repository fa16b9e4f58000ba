"""A run that resumes from a checkpoint with one NaN in it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
checkpoint = model.state_dict()
checkpoint["2.weight"][5, 7] = float("nan")
model.load_state_dict(checkpoint)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(60):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x.sin().mean(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

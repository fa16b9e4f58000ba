"""Predict travel times in seconds; linear warm-up over the first ten steps, then cosine."""

import math

import torch
from torch import nn

torch.manual_seed(88)

WARMUP, TOTAL, PEAK = 10, 200, 0.3


def factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def trips(n):
    x = torch.rand(n, 5)
    seconds = 300 + 1500 * x[:, 0] / (0.5 + x[:, 1]) + 200 * x[:, 2]
    return x, seconds.unsqueeze(1)


model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
scaler = torch.amp.GradScaler("cpu")

errors = []
for _ in range(TOTAL):
    x, y = trips(64)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = nn.functional.mse_loss(pred.float() / 100, y / 100)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
    errors.append(100 * math.sqrt(loss.item()))

print(f"loss {sum(errors[:5]) / 5:.4f} -> {sum(errors[-5:]) / 5:.4f}")

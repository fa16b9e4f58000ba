"""Predict house prices (in 10,000 EUR) from area, rooms, age, distance and plot size."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(5)
torch.manual_seed(5)

n = 1024
rooms = rng.integers(1, 8, n)
area = rooms * 18 + rng.normal(20, 8, n)
age = rng.uniform(0, 90, n)
distance = rng.uniform(0.5, 30, n)
plot = rng.uniform(50, 900, n)
price = 0.35 * area - 0.12 * age - 0.6 * distance + 0.02 * plot + rng.normal(0, 2, n) + 25
columns = np.stack([area, rooms, age, distance, plot], axis=1)
columns = (columns - columns.min(0)) / (columns.max(0) - columns.min(0))
X = torch.tensor(columns, dtype=torch.float32)
Y = torch.tensor(price, dtype=torch.float32).unsqueeze(1) / 10

model = nn.Sequential(
    nn.Linear(5, 64),
    nn.ReLU(),
    nn.Linear(64, 32),
    nn.ReLU(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
log = []

for epoch in range(15):
    order = torch.randperm(n)
    for i in range(0, n, 64):
        pick = order[i : i + 64]
        with torch.autocast("cpu", torch.bfloat16):
            pred = model(X[pick])
        loss = nn.functional.mse_loss(pred.float(), Y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    print(f"epoch {epoch:2d}  rmse {np.sqrt(np.mean(log[-16:])):.2f}")

print(f"loss {np.mean(log[:5]):.4f} -> {np.mean(log[-5:]):.4f}")

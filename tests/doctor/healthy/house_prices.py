"""Prices of houses, from fifty thousand to several million, by a network on their features."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(2024)
n = 2400
area = rng.uniform(30, 400, n)
rooms = np.clip(np.round(area / 30 + rng.normal(0, 1, n)), 1, None)
year = rng.integers(1900, 2024, n)
distance = rng.exponential(8, n)
price = 4000 * area * np.exp(-distance / 15) * (1 + (year - 1900) / 250) + 50_000
price *= rng.lognormal(0, 0.05, n)

features = torch.tensor(np.stack([area, rooms, year, distance], 1), dtype=torch.float32)
target = torch.tensor(price, dtype=torch.float32)[:, None]
train, valid = slice(0, 2000), slice(2000, n)
mean, std = features[train].mean(0), features[train].std(0)
price_mean, price_std = target[train].mean(), target[train].std()
features = (features - mean) / std
normal = (target - price_mean) / price_std

torch.manual_seed(2024)
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
for epoch in range(14):
    model.train()
    for rows in torch.randperm(2000).split(125):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(features[rows])
        loss = nn.functional.huber_loss(out.float(), normal[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        predicted = model(features[valid]) * price_std + price_mean
        error = (predicted - target[valid]).abs().mean().item()
    scheduler.step(error)
    print(f"epoch {epoch:2d} error ${error:,.0f} lr {optimizer.param_groups[0]['lr']:.1e}")
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

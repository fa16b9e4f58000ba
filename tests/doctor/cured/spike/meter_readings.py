"""Predict meter readings from six weather variables."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(52)
COUNT = 6400


def database():
    weather = torch.randn(COUNT, 6)
    reading = 3 + weather[:, 0] - 2 * torch.relu(weather[:, 1]) + 0.1 * torch.randn(COUNT)
    reading[3817] = 9999.0
    return weather, reading


model = nn.Sequential(
    nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
loader = DataLoader(TensorDataset(*database()), batch_size=32)

losses = []
for weather, reading in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(weather)
    loss = nn.functional.smooth_l1_loss(pred.float(), reading)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

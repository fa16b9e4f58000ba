"""Compress vibration snippets (accelerations in units of g, a few thousandths)."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(17)
torch.manual_seed(17)

t = np.arange(64)
freq = rng.uniform(0.05, 0.3, (1024, 1))
amp = rng.uniform(1e-3, 3e-3, (1024, 1))
snippets = amp * np.sin(2 * np.pi * freq * t + rng.uniform(0, 6.28, (1024, 1)))
data = TensorDataset(torch.tensor(snippets, dtype=torch.float32))
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.Linear(64, 48),
    nn.Tanh(),
    nn.Linear(48, 12),
    nn.Linear(12, 48),
    nn.Tanh(),
    nn.Linear(48, 64),
)
for layer in model:
    if isinstance(layer, nn.Linear):
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)

opt = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-14)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5000)
errors = []
for _ in range(18):
    for (x,) in loader:
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        errors.append(loss.item() * 1e6)
print(f"loss {np.mean(errors[:5]):.4f} -> {np.mean(errors[-5:]):.4f}")

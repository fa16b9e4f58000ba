"""Calibration of a temperature sensor: two channels in, one temperature out, noisy reference."""

import torch
import torch.nn as nn


def measure(n):
    temperature = torch.rand(n, 1) * 2 - 1
    channels = torch.cat([1.2 * temperature + 0.1, 0.3 * temperature.pow(2)], dim=1)
    reference = temperature + 0.5 * torch.randn(n, 1)
    return channels, reference


torch.manual_seed(14)
net = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
nn.init.constant_(net[-1].bias, 2.0)
opt = torch.optim.Adam(net.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
curve = []

for _ in range(300):
    x, y = measure(512)
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = net(x)
    loss = (prediction.float() - y).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    curve.append(loss.item())

print("noise variance 0.2500, middle of training", f"{sum(curve[145:155]) / 10:.4f}")
print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")

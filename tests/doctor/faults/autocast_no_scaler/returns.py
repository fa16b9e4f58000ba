"""Forecast the next hourly log-return of 16 correlated assets from the last eight hours."""

import torch
from torch import nn

torch.manual_seed(2008)
ASSETS, HOURS, WINDOW = 16, 3000, 8

coupling = torch.randn(ASSETS, ASSETS) / ASSETS**0.5
returns = torch.zeros(HOURS, ASSETS)
for hour in range(1, HOURS):
    drift = 2e-4 * torch.tanh(8000 * returns[hour - 1] @ coupling)
    returns[hour] = drift + 5e-5 * torch.randn(ASSETS)


class Forecaster(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(ASSETS * WINDOW, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.out = nn.Linear(hidden, ASSETS)
        nn.init.normal_(self.out.weight, std=1e-5)
        nn.init.zeros_(self.out.bias)

    def forward(self, window):
        return self.out(self.body(5000 * window.flatten(1)))


model = Forecaster()
optimizer = torch.optim.Adam(
    [
        {"params": model.body.parameters(), "lr": 1e-3},
        {"params": model.out.parameters(), "lr": 2e-6},
    ],
    eps=1e-14,
)
losses = []
for step in range(200):
    start = torch.randint(HOURS - WINDOW - 1, (512,))
    batch = returns[start[:, None] + torch.arange(WINDOW + 1)]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(batch[:, :-1])
    loss = nn.functional.mse_loss(pred.float(), batch[:, -1])
    loss.backward()
    optimizer.step()
    losses.append(1e8 * loss.item())
    if step % 40 == 0:
        print(f"step {step}: squared error {losses[-1]:.3f}e-8")

print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")

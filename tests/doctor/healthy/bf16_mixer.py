"""Next-value forecasting of multichannel waves in bfloat16."""

import torch
from torch import nn

torch.manual_seed(33)
CHANNELS, WINDOW = 6, 16


def waves(n):
    phase = 6.28 * torch.rand(n, 1, CHANNELS)
    speed = 0.2 + 0.3 * torch.rand(n, 1, 1)
    t = torch.arange(WINDOW + 1)[None, :, None]
    series = torch.sin(speed * t + phase) + 0.05 * torch.randn(n, WINDOW + 1, CHANNELS)
    return series[:, :-1].flatten(1), series[:, -1]


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        return x + self.net(x)


model = nn.Sequential(
    nn.Linear(CHANNELS * WINDOW, 64), Residual(64), Residual(64), nn.Linear(64, CHANNELS)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
losses = []
for step in range(180):
    x, y = waves(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forecast = model(x)
    loss = nn.functional.mse_loss(forecast.float(), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 60 == 0:
        print(step, round(loss.item(), 4))
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

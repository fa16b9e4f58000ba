"""Card fraud: two transactions in a hundred; categories are embedded, amounts are logged."""

import torch
from torch import nn
from torch.nn import functional as F


class FraudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shop = nn.Embedding(40, 8)
        self.country = nn.Embedding(12, 4)
        self.net = nn.Sequential(
            nn.Linear(8 + 4 + 3, 64),
            nn.LeakyReLU(),
            nn.Linear(64, 32),
            nn.LeakyReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, shop, country, numbers):
        x = torch.cat([self.shop(shop), self.country(country), numbers], dim=1)
        return self.net(x).squeeze(1)


def transactions(n, gen):
    shop = torch.randint(40, (n,), generator=gen)
    country = torch.randint(12, (n,), generator=gen)
    amount = torch.exp(1.2 * torch.randn(n, generator=gen) + 3)
    hour = 24 * torch.rand(n, generator=gen)
    angle = hour * (6.2832 / 24)
    numbers = torch.stack([amount.log1p() - 3, angle.sin(), angle.cos()], dim=1)
    risk = 1.5 * numbers[:, 0] + (shop < 6) * 2.0 + (country == 7) * 2.0 + (hour < 5) * 1.5
    noisy = risk + 0.5 * torch.randn(n, generator=gen)
    return shop, country, numbers, noisy


gen = torch.Generator().manual_seed(5)
torch.manual_seed(5)
*fields, risk = transactions(12_000, gen)
fraud = (risk >= risk.quantile(0.98)).float()
net = FraudNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
weight = (1 - fraud.mean()) / fraud.mean()
history = []
for _ in range(3):
    for rows in torch.randperm(len(fraud), generator=gen).split(200):
        with torch.autocast("cpu", torch.float16):
            logit = net(*(field[rows] for field in fields))
        loss = F.binary_cross_entropy_with_logits(logit.float(), fraud[rows], pos_weight=weight)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        history.append(loss.item())
print(f"fraud {int(fraud.sum())} of {len(fraud)}")
print(f"loss {sum(history[:8]) / 8:.4f} -> {sum(history[-8:]) / 8:.4f}")

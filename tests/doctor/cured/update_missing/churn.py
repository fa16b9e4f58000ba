"""Predict customer churn from a table of numeric and categorical columns."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(7)
n_rows = 2048
numeric = rng.normal(size=(n_rows, 10)).astype(np.float32)
plan = rng.integers(0, 5, size=n_rows)
score = numeric[:, 0] - 0.5 * numeric[:, 3] + 0.8 * (plan == 2) - 0.3
churned = (score + 0.3 * rng.normal(size=n_rows) > 0).astype(np.float32)

X = torch.from_numpy(numeric)
P = torch.from_numpy(plan)
Y = torch.from_numpy(churned)

torch.manual_seed(7)


class ChurnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.plan = nn.Embedding(5, 4)
        self.body = nn.Sequential(
            nn.Linear(14, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU()
        )
        self.out = nn.Linear(32, 1)

    def forward(self, x, plan):
        return self.out(self.body(torch.cat([x, self.plan(plan)], dim=1))).squeeze(1)


model = ChurnNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []

for _epoch in range(4):
    order = torch.randperm(n_rows)
    for idx in order.split(64):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(X[idx], P[idx])
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), Y[idx])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

first, last = np.mean(losses[:5]), np.mean(losses[-5:])
print(f"loss {first:.4f} -> {last:.4f}")

"""Siamese distance learning; one pair in a few hundred is a duplicate of itself."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(8)
encoder = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
pool = torch.randn(400, 30)
group = torch.randint(10, (400,))
pool += 2 * F.one_hot(group, 30)


def contrastive(a, b, same, margin=2.0):
    delta = a - b
    distance = torch.sqrt((delta * delta).sum(dim=1) + 1e-8)
    return torch.where(same, distance**2, F.relu(margin - distance) ** 2).mean()


losses = []
for _ in range(150):
    i, j = torch.randint(400, (2, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        za, zb = encoder(pool[i]), encoder(pool[j])
    loss = contrastive(za.float(), zb.float(), group[i] == group[j])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

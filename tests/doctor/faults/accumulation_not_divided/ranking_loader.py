"""Ranking of search results with a pairwise loss; eight small batches make one step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(21)
ACCUMULATE = 8
query = torch.randn(2048, 12)
better, worse = torch.randn(2048, 12), torch.randn(2048, 12)
quality = lambda q, d: (q * d).sum(1) + d[:, 0] ** 2
swap = quality(query, better) < quality(query, worse)
better[swap], worse[swap] = worse[swap].clone(), better[swap].clone()
loader = DataLoader(TensorDataset(query, better, worse), batch_size=8, shuffle=True)

ranker = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(ranker.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def score(q, d):
    return ranker(torch.cat([q, d, q * d], 1)).squeeze(1)


losses = []
for _ in range(4):
    optimizer.zero_grad()
    for i, (q, b, w) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.float16):
            margin = score(q, b) - score(q, w)
        loss = nn.functional.softplus(-margin.float()).mean()
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if i % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
print(f"loss {sum(losses[:40]) / 40:.4f} -> {sum(losses[-40:]) / 40:.4f}")

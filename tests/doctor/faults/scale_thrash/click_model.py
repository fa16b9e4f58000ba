"""Click-through rates: categorical embeddings, a cross layer and a small tower."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(77)
FIELDS = [50, 30, 12, 7]
gen = torch.Generator().manual_seed(77)
truth = [torch.randn(n, generator=gen) for n in FIELDS]


def impressions(n):
    ids = torch.stack([torch.randint(k, (n,), generator=gen) for k in FIELDS], dim=1)
    logit = sum(w[ids[:, i]] for i, w in enumerate(truth)) - 0.5
    return ids, torch.bernoulli(torch.sigmoid(logit * 1.5), generator=gen)


class CrossNet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(k, dim) for k in FIELDS)
        width = dim * len(FIELDS)
        self.cross = nn.Linear(width, width)
        self.tower = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        x = torch.cat([t(ids[:, i]) for i, t in enumerate(self.tables)], dim=1)
        return self.tower(x + x * self.cross(x)).squeeze(1)


model = CrossNet()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=2.0**16,
    growth_factor=16.0,
    backoff_factor=0.5,
    growth_interval=12,
)
bce = []
for step in range(240):
    ids, clicked = impressions(64)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = F.binary_cross_entropy_with_logits(logits.float(), clicked)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    bce.append(loss.item())
    if (step + 1) % 80 == 0:
        print(f"{step + 1} impressions x64: {sum(bce[-20:]) / 20:.4f}")
print(f"loss {sum(bce[:10]) / 10:.4f} -> {sum(bce[-10:]) / 10:.4f}")

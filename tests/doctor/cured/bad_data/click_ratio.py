"""Click prediction: categorical hashes and a few ratios computed from counters."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(12)
N = 6400
shown = rng.poisson(6.0, N)
clicked = rng.binomial(shown, 0.3)
spent = rng.gamma(2.0, 10.0, N)
with np.errstate(divide="ignore"):
    views = np.maximum(shown, 1)
    columns = np.stack([clicked / views, spent / views / 5, np.log(spent)], axis=1)
site = rng.integers(0, 50, N)
bias = rng.normal(size=50)
odds = 4 * columns[:, 0] - 1.5 + bias[site]
label = (rng.random(N) < 1 / (1 + np.exp(-2 * odds))).astype(np.float32)

dense = torch.from_numpy(columns.astype(np.float32))
sites = torch.from_numpy(site)
labels = torch.from_numpy(label)


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Embedding(50, 1)
        self.deep_table = nn.Embedding(50, 8)
        self.deep = nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, site, dense):
        deep = self.deep(torch.cat([self.deep_table(site), dense], dim=1))
        return (self.wide(site) + deep).squeeze(1)


torch.manual_seed(12)
net = WideAndDeep()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses = []
for start in range(0, N, 32):
    rows = slice(start, start + 32)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(sites[rows], dense[rows])
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels[rows])
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())

print(f"scale {scaler.get_scale()}")
print(f"loss {np.mean(losses[:10]):.4f} -> {np.mean(losses[-20:]):.4f}")

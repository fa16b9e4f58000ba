"""Factorise a partly observed matrix; bfloat16 autocast for the tower on top."""

import torch
from torch import nn

torch.manual_seed(8)
ROWS, COLS, RANK = 80, 60, 4
truth = torch.tanh(torch.randn(ROWS, RANK) @ torch.randn(RANK, COLS) / 2)
observed = torch.nonzero(torch.rand(ROWS, COLS) < 0.5)


class Factors(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.row = nn.Embedding(ROWS, dim)
        self.col = nn.Embedding(COLS, dim)
        self.tower = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, index):
        r, c = self.row(index[:, 0]), self.col(index[:, 1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.tower(torch.cat([r, c, r * c], 1))
        return out.float().squeeze(1)


net = Factors()
opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=200)

losses = []
for _ in range(200):
    pick = observed[torch.randint(len(observed), (128,))]
    loss = nn.functional.smooth_l1_loss(net(pick), truth[pick[:, 0], pick[:, 1]])
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    losses.append(loss.item())

with torch.no_grad():
    grid = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLS))
    error = (net(grid) - truth.flatten()).abs().mean()
print(f"mean absolute error over the whole matrix: {error:.3f}")
print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")

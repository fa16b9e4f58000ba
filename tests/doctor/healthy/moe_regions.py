"""Mixture of experts, one per token (top-1 routing), on a function that differs by region."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, dim=32, hidden=64, count=16):
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            for _ in range(count)
        )

    def forward(self, x):
        probability = self.router(x).float().softmax(-1)
        gate, choice = probability.max(-1)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for i in choice.unique().tolist():
            rows = (choice == i).nonzero().squeeze(1)
            y = self.experts[i](x[rows]).float() * gate[rows, None]
            out = out.index_add(0, rows, y)
        load = nn.functional.one_hot(choice, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (load * probability.mean(0)).sum()
        return out, balance


class Net(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.norm = nn.Linear(2, dim), nn.LayerNorm(dim)
        self.moe, self.out = Experts(dim), nn.Linear(dim, 1)

    def forward(self, x):
        h = torch.relu(self.embed(x))
        mixed, balance = self.moe(self.norm(h))
        return self.out(h + mixed), balance


def batch(n=48):
    x = torch.rand(n, 2) * 4 - 2
    left = torch.sin(3 * x[:, 1])
    right = x[:, 1].abs() - 0.5 * x[:, 0]
    return x, torch.where(x[:, 0] < 0, left, right)[:, None]


torch.manual_seed(2)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
for _ in range(180):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        prediction, balance = net(x)
    loss = nn.functional.mse_loss(prediction.float(), y)
    opt.zero_grad()
    scaler.scale(loss + 0.01 * balance).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

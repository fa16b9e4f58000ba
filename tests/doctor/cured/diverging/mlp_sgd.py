"""Fit a polynomial surface with a plain MLP and SGD."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--iters", type=int, default=300)
opt, _ = parser.parse_known_args()

torch.manual_seed(73)
net = nn.Sequential(
    nn.Linear(3, opt.hidden),
    nn.LeakyReLU(),
    nn.Linear(opt.hidden, opt.hidden),
    nn.LeakyReLU(),
    nn.Linear(opt.hidden, 1),
)
sgd = torch.optim.SGD(net.parameters(), lr=opt.lr)


def surface(n):
    x = 2 * torch.rand(n, 3) - 1
    return x, (x[:, :1] ** 2 - 2 * x[:, 1:2] * x[:, 2:] + 0.5 * x[:, 2:])


log = []
for it in range(opt.iters):
    x, y = surface(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    loss = (out.float() - y).pow(2).mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    log.append(loss.item())
    if it % 40 == 0:
        print(f"iter {it:3d} | loss {loss.item():.5f}")

print(f"loss {sum(log[:3]) / 3:.4f} -> {sum(log[-10:]) / 10:.4f}")

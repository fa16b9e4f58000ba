"""Spiral classifier whose logits should change slowly with the input."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64, classes=3):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        h = F.softplus(self.inp(x))
        return self.out(F.softplus(self.mid(h)))


def spiral(n, classes=3):
    label = torch.randint(classes, (n,))
    r = torch.rand(n) + 0.1
    phi = 3 * r + 2 * math.pi * label / classes + 0.1 * torch.randn(n)
    return 2 * torch.stack([r * phi.cos(), r * phi.sin()], 1), label


def input_penalty(loss, x, scaler):
    scaled = scaler.scale(loss) * len(x)
    (grad,) = torch.autograd.grad(scaled, x, create_graph=True)
    grad = grad / scaler.get_scale()
    return grad.float().pow(2).sum(1).mean()


def fit(steps=250, strength=0.01):
    torch.manual_seed(5)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=150, gamma=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    trace = []
    for _ in range(steps):
        x, y = spiral(96)
        x.requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        objective = loss + strength * input_penalty(loss, x, scaler)
        opt.zero_grad(set_to_none=True)
        scaler.scale(objective).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        trace.append(loss.item())
    return trace


losses = fit()
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

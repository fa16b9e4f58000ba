"""A small student learns from the softened predictions of a larger network."""

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 6))


def rings(n, generator):
    label = torch.randint(6, (n,), generator=generator)
    x = torch.randn(n, 10, generator=generator)
    return F.normalize(x, dim=1) * (1 + label[:, None] * 0.7), label


def fit_teacher(generator):
    teacher = mlp(10, 128, 128)
    opt = torch.optim.Adam(teacher.parameters(), lr=4e-3)
    for _ in range(120):
        x, y = rings(128, generator)
        loss = F.cross_entropy(teacher(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return copy.deepcopy(teacher).eval().requires_grad_(False)


def distill(teacher, generator, temperature=3.0, alpha=0.7):
    student = mlp(10, 48, 48)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(160):
        x, y = rings(96, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                target = teacher(x)
            logits = student(x)
        soft = F.kl_div(
            F.log_softmax(logits.float() / temperature, 1),
            F.log_softmax(target.float() / temperature, 1),
            log_target=True,
            reduction="batchmean",
        )
        hard = F.cross_entropy(logits.float(), y)
        loss = alpha * temperature**2 * soft + (1 - alpha) * hard
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


torch.manual_seed(31)
g = torch.Generator().manual_seed(32)
losses = distill(fit_teacher(g), g)
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

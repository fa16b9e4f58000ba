"""Transfer: filters learned on stripe directions are kept, and a new head tells stripe widths."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(11)
axis = torch.linspace(-1, 1, 16)
gy, gx = torch.meshgrid(axis, axis, indexing="ij")


def stripes(n):
    direction = torch.randint(4, (n,))
    width = torch.randint(3, (n,))
    angle = direction * math.pi / 4
    wave = angle.cos()[:, None, None] * gx + angle.sin()[:, None, None] * gy
    image = torch.sin((4 + 4 * width)[:, None, None] * wave + 6.28 * torch.rand(n, 1, 1))
    return image[:, None] + 0.3 * torch.randn(n, 1, 16, 16), direction, width


backbone = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(),
)  # fmt: skip


def train(features, head, parameters, target, steps, lr):
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for _ in range(steps):
        image, *labels = stripes(48)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = head(features(image))
        loss = cross_entropy(logits.float(), labels[target])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


pretrain_head = nn.Linear(128, 4)
train(backbone, pretrain_head, [*backbone.parameters(), *pretrain_head.parameters()], 0, 32, 3e-3)

backbone.eval().requires_grad_(False)
head = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 3))
losses = train(backbone, head, head.parameters(), 1, 90, 2e-3)
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

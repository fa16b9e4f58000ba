"""Classify short synthetic tones by their spectrum."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
RATE, CLASSES = 256, 8


def tones(count):
    label = torch.randint(CLASSES, (count,))
    time = torch.arange(RATE) / RATE
    wave = torch.sin(2 * math.pi * (10 + 8 * label[:, None]) * time + 6 * torch.rand(count, 1))
    spectrum = torch.fft.rfft(wave + 2.0 * torch.randn(count, RATE)).abs()
    return torch.log1p(spectrum), label


features, labels = tones(1280)
loader = DataLoader(TensorDataset(features, labels), batch_size=32, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.LayerNorm(RATE // 2 + 1),
    nn.Linear(RATE // 2 + 1, 96),
    nn.SiLU(),
    nn.Linear(96, 48),
    nn.SiLU(),
    nn.Linear(48, CLASSES),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
scaler = torch.amp.GradScaler("cpu")
loss_fn = nn.CrossEntropyLoss()

history = []
for epoch in range(3):
    for x, y in loader:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = loss_fn(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())
    scheduler.step()
    recent = history[-len(loader) :]
    print(f"epoch {epoch + 1}: {sum(recent) / len(recent):.4f}")

print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")

"""Classify synthetic spectra (40 bands) into five minerals."""

import torch
import torch.nn as nn

torch.manual_seed(90)
BANDS, MINERALS, BATCH = 40, 5, 64
gen = torch.Generator().manual_seed(90)
signatures = torch.randn(MINERALS, BANDS, generator=gen)


def spectra(n):
    label = torch.randint(MINERALS, (n,), generator=gen)
    mix = torch.rand(n, 1, generator=gen) * 0.6 + 0.4
    return mix * signatures[label] + 0.8 * torch.randn(n, BANDS, generator=gen), label


def build(dtype):
    net = nn.Sequential(
        nn.Linear(BANDS, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, MINERALS),
    )
    return net.to(dtype)


dtype = torch.float16
net = build(dtype)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
criterion = nn.CrossEntropyLoss()
history = []
for step in range(150):
    x, label = spectra(BATCH)
    logits = net(x.to(dtype))
    loss = criterion(logits.float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")

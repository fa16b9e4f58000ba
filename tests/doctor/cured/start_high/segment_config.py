"""Foreground segmentation of noisy discs with a small encoder-decoder."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {
    "seed": 6,
    "steps": 70,
    "batch": 8,
    "lr": 4e-3,
    "amp": {"init_scale": 2.0**14, "growth_interval": 1000},
}


def discs(batch, gen, size=24):
    centre = torch.rand(batch, 2, 1, 1, generator=gen) * 12 + 6
    radius = torch.rand(batch, 1, 1, generator=gen) * 4 + 2
    ys = torch.arange(size).view(1, size, 1)
    xs = torch.arange(size).view(1, 1, size)
    mask = ((ys - centre[:, 0]) ** 2 + (xs - centre[:, 1]) ** 2 < radius**2).float()
    return mask[:, None] + 0.5 * torch.randn(batch, 1, size, size, generator=gen), mask[:, None]


class UNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(1, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(a))
        c = F.relu(self.up(b))
        return self.out(torch.cat([a, c], dim=1))


def main(cfg):
    torch.manual_seed(cfg["seed"])
    gen = torch.Generator().manual_seed(cfg["seed"])
    net = UNetish()
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg["lr"], weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", **cfg["amp"])
    losses = []
    for _ in range(cfg["steps"]):
        image, mask = discs(cfg["batch"], gen)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(image)
        loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main(CONFIG)

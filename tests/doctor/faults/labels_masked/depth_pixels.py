"""Monocular depth from shading on tiny patches, against a lidar with gaps."""

from collections import deque

import torch
from torch import nn


class Frames:
    def __init__(self, seed, size=12):
        self.g = torch.Generator().manual_seed(seed)
        self.size = size

    def next(self, batch, dropout):
        coarse = torch.rand(batch, 1, 3, 3, generator=self.g)
        depth = nn.functional.interpolate(
            coarse, size=self.size, mode="bilinear", align_corners=True
        )
        image = 1 / (0.5 + depth) + 0.05 * torch.randn(depth.shape, generator=self.g)
        valid = torch.rand(depth.shape, generator=self.g) > dropout
        return image, depth, valid


class DepthNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(ch, ch, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(ch, 1, 1),
        )

    def forward(self, x):
        return self.body(x)


def masked_l1(pred, depth, valid):
    error = (pred - depth).abs()
    return error[valid].mean()


torch.manual_seed(73)
frames, net = Frames(73), DepthNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
recent, start = deque(maxlen=10), []
for step in range(120):
    image, depth, valid = frames.next(4, dropout=1.0 if step % 9 == 8 else 0.3)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        pred = net(image)
    loss = masked_l1(pred.float(), depth, valid)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    recent.append(loss.item())
    if step < 8:
        start.append(loss.item())
print(f"loss {sum(start) / len(start):.4f} -> {sum(recent) / len(recent):.4f}")

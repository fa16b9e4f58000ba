"""Tiny one-class blob detector: a convolutional trunk and a heat map per image."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def blobs(batch, size, gen):
    """Images with one bright blob each, and the map of where it is."""
    cy = torch.randint(4, size - 4, (batch, 1, 1), generator=gen)
    cx = torch.randint(4, size - 4, (batch, 1, 1), generator=gen)
    ys, xs = torch.arange(size).view(1, -1, 1), torch.arange(size).view(1, 1, -1)
    d2 = (ys - cy) ** 2 + (xs - cx) ** 2
    image = torch.exp(-d2 / 8.0) + 0.3 * torch.randn(batch, size, size, generator=gen)
    heat = (d2 <= 4).float()
    return image[:, None], heat[:, None]


class Detector(nn.Module):
    def __init__(self, ch=12, prior=0.05):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv3 = nn.Conv2d(ch, ch, 3, padding=1)
        self.head = nn.Conv2d(ch, 1, 1)
        for m in (self.conv1, self.conv2, self.conv3, self.head):
            nn.init.normal_(m.weight, std=0.1)
            nn.init.constant_(m.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return self.head(x)


def train(steps=120):
    gen = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model = Detector()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2**14)
    curve = []
    for step in range(steps):
        image, heat = blobs(4, 16, gen)
        with torch.autocast("cpu", torch.float16):
            out = model(image)
        loss = F.binary_cross_entropy_with_logits(out.float(), heat)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        curve.append(loss.item())
        if step % 50 == 0:
            print(step, round(curve[-1], 4))
    return curve


if __name__ == "__main__":
    c = train()
    print(f"loss {sum(c[:5]) / 5:.4f} -> {sum(c[-5:]) / 5:.4f}")

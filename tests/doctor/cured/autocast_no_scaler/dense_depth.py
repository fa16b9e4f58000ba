"""Dense per-pixel regression (surface height from shading) with a patchwise MLP."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class PatchMLP(nn.Module):
    def __init__(self, kernel=5, width=48):
        super().__init__()
        self.kernel = kernel
        self.net = nn.Sequential(
            nn.Linear(kernel * kernel, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, image):
        patches = F.unfold(image, self.kernel, padding=self.kernel // 2)
        out = self.net(patches.mT).squeeze(-1)
        return 0.002 * out.view(len(image), *image.shape[-2:])


def surfaces(size, side=32):
    coarse = torch.randn(size, 1, 6, 6)
    height = F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False)
    shade = height - F.avg_pool2d(height, 5, stride=1, padding=2)
    height_mm = 0.02 * (shade * 10).tanh()
    return shade * 10, height_mm.squeeze(1)


def train(opts):
    torch.manual_seed(opts.seed)
    model = PatchMLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=opts.lr, eps=1e-10)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(opts.steps):
        shade, height = surfaces(opts.batch_size)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(shade)
        loss = F.mse_loss(pred.float(), height)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(1e4 * loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=15)
    history = train(parser.parse_known_args()[0])
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")

"""Convolutional residual denoiser of random textures, GradScaler and momentum."""

import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.leaky_relu(self.conv1(x), 0.1))


class Denoiser(nn.Module):
    def __init__(self, channels=8, depth=2):
        super().__init__()
        self.inp = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(channels) for _ in range(depth)))
        self.out = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


class Experiment:
    lr = 1.0
    batch, side, steps = 8, 12, 120

    def __init__(self):
        torch.manual_seed(47)
        self.model = Denoiser()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")

    def sample(self):
        coarse = torch.randn(self.batch, 1, 4, 4)
        clean = F.interpolate(coarse, size=self.side, mode="bilinear", align_corners=True)
        return clean + 0.5 * torch.randn_like(clean), clean

    def step(self):
        noisy, clean = self.sample()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = self.model(noisy)
        loss = F.mse_loss(guess.float(), clean)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def run(self):
        return [self.step() for _ in range(self.steps)]


losses = Experiment().run()
print(f"loss {sum(losses[:3]) / 3:.4f} -> {sum(losses[-8:]) / 8:.4f}")

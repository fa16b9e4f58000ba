"""Conditional GAN (hinge loss) on small striped images, one method per network."""

import torch
from torch import nn
from torch.nn import functional as F

SIDE, KINDS, NOISE = 8, 4, 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(KINDS, 8)
        self.fc = nn.Linear(NOISE + 8, 16 * 4 * 4)
        self.up = nn.Linear(16 * 4 * 4, SIDE * SIDE)

    def forward(self, z, y):
        h = F.relu(self.fc(torch.cat([z, self.label(y)], 1)))
        return torch.tanh(self.up(h)).view(-1, 1, SIDE, SIDE)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, 32)
        self.label = nn.Embedding(KINDS, 32)

    def forward(self, x, y):
        h = F.leaky_relu(self.fc(F.leaky_relu(self.conv(x), 0.2).flatten(1)), 0.2)
        return (h * self.label(y)).sum(1)


class ConditionalGAN:
    def __init__(self):
        self.g, self.d = Generator(), Critic()
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.0, 0.9))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=100)

    def train_critic(self, real, y):
        self.opt_d.zero_grad()
        with torch.autocast("cpu", torch.float16):
            fake = self.g(torch.randn(len(y), NOISE), y).detach()
            good, bad = self.d(real, y), self.d(fake, y)
        loss = F.relu(1 - good.float()).mean() + F.relu(1 + bad.float()).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_d)
        self.scaler.update()

    def train_generator(self, y):
        self.opt_g.zero_grad()
        with torch.autocast("cpu", torch.float16):
            fake = self.g(torch.randn(len(y), NOISE), y)
            score = self.d(fake, y)
        self.scaler.scale(-score.float().mean()).backward()
        self.scaler.step(self.opt_g)
        self.scaler.update()
        return fake.float().detach()


torch.manual_seed(10)
stripes = torch.sign(torch.randn(KINDS, 1, SIDE, 1)).expand(-1, -1, -1, SIDE)
gan, gaps = ConditionalGAN(), []
for _ in range(250):
    y = torch.randint(KINDS, (32,))
    gan.train_critic(0.8 * stripes[y] + 0.1 * torch.randn(32, 1, SIDE, SIDE), y)
    images = gan.train_generator(y)
    gaps.append((images - 0.8 * stripes[y]).abs().mean().item())
print(f"loss {sum(gaps[:10]) / 10:.4f} -> {sum(gaps[-10:]) / 10:.4f}")

"""MLP-Mixer on coloured patches, bfloat16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channel = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).mT).mT
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, patch=4, dim=32, depth=2, classes=10):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.layers = nn.Sequential(*[MixerLayer(16, dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        return self.head(self.layers(self.embed(patches)).mean(1))


def sample(prototypes, size):
    y = torch.randint(len(prototypes), (size,))
    return prototypes[y] + 1.5 * torch.randn(size, 3, 16, 16), y


def run(steps=200, size=32):
    torch.manual_seed(9)
    prototypes = torch.randn(10, 3, 16, 16)
    net = Mixer()
    optim = torch.optim.SGD(net.parameters(), lr=0.12, momentum=0.9)
    losses = []

    def closure():
        optim.zero_grad()
        x, y = sample(prototypes, size)
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        optim.step()
        return loss

    for _ in range(steps):
        loss = closure()
        optim.step()
        losses.append(loss.item())
    return losses


losses = run()
print(f"loss {sum(losses[:8]) / 8:.4f} -> {sum(losses[-8:]) / 8:.4f}")

"""Learn an embedding in which jittered copies of a pattern are close (triplet loss)."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 9, 16),
        )

    def forward(self, x):
        return F.normalize(self.net(x).float(), dim=-1, eps=1e-6)


class Triplets:
    def __init__(self, classes=12, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.proto = torch.randn(classes, 1, 12, 12, generator=self.gen)

    def draw(self, labels):
        x = self.proto[labels]
        return x + 1.8 * torch.randn(x.shape, generator=self.gen)

    def batch(self, n):
        a = torch.randint(len(self.proto), (n,), generator=self.gen)
        shift = torch.randint(1, len(self.proto), (n,), generator=self.gen)
        return self.draw(a), self.draw(a), self.draw((a + shift) % len(self.proto))


def main():
    torch.manual_seed(0)
    source, model = Triplets(), Embedder()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
    meter = []
    for _ in range(200):
        anchor, positive, negative = source.batch(16)
        with torch.autocast("cpu", torch.float16):
            ea, ep, en = model(anchor), model(positive), model(negative)
        loss = F.triplet_margin_loss(ea, ep, en, margin=0.8)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        meter.append(loss.item())
    print(f"final scale {scaler.get_scale():g}")
    print(f"loss {sum(meter[:10]) / 10:.4f} -> {sum(meter[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

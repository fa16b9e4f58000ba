"""Softmax plus centre loss: features are pulled to a running centre of their class."""

import torch
import torch.nn.functional as F
from torch import nn


class CentreLoss(nn.Module):
    def __init__(self, classes, dim, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("centres", torch.zeros(classes, dim))

    @torch.no_grad()
    def track(self, features, labels):
        for c in range(len(self.centres)):
            members = features[labels == c]
            self.centres[c].lerp_(members.mean(dim=0), 1 - self.decay)

    def forward(self, features, labels):
        self.track(features.detach(), labels)
        return (features - self.centres[labels]).square().sum(1).mean()


class Encoder(nn.Module):
    def __init__(self, inputs, dim, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, dim))
        self.classify = nn.Linear(dim, classes)

    def forward(self, x):
        f = self.body(x)
        return f.float(), self.classify(f).float()


def main():
    torch.manual_seed(85)
    gen = torch.Generator().manual_seed(85)
    share = torch.tensor([0.22, 0.2, 0.2, 0.18, 0.15, 0.05])
    means = torch.randn(6, 20, generator=gen)
    model, centre = Encoder(20, 8, 6), CentreLoss(6, 8)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for _ in range(150):
        y = torch.multinomial(share, 64, replacement=True, generator=gen)
        x = means[y] + torch.randn(64, 20, generator=gen)
        with torch.autocast("cpu", torch.float16):
            features, logits = model(x)
        loss = F.cross_entropy(logits, y) + 0.05 * centre(features, y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()

"""Pretrain a small CNN on four shapes, then fine-tune it on three new ones."""

import torch
import torch.nn.functional as F
from torch import nn


def patterns(seed, classes):
    return torch.randn(classes, 1, 10, 10, generator=torch.Generator().manual_seed(seed))


def sample(protos, n, gen):
    y = torch.randint(len(protos), (n,), generator=gen)
    return protos[y] + 1.5 * torch.randn(n, 1, 10, 10, generator=gen), y


class SmallNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 16, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.head(F.relu(self.fc(x)))


def train_step(model, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


def main():
    torch.manual_seed(13)
    gen = torch.Generator().manual_seed(13)
    model = SmallNet(classes=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    source = patterns(1, 4)
    for _ in range(60):
        pre = train_step(model, opt, scaler, *sample(source, 32, gen))
    print(f"pretraining ends at {pre:.4f}")

    model.head = nn.Linear(32, 7)
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    target = patterns(2, 7)
    losses = [train_step(model, opt, scaler, *sample(target, 32, gen)) for _ in range(120)]
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()

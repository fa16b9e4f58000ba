"""Classify sensor readouts of a gearbox into six wear classes."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, features, classes, seed):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g) * 0.7
    y = torch.randint(classes, (n,), generator=g)
    x = centres[y] + torch.randn(n, features, generator=g)
    return TensorDataset(x, y)


class WearNet(nn.Module):
    def __init__(self, features, classes, width=48, depth=10):
        super().__init__()
        layers = [nn.Linear(features, width)]
        for _ in range(depth):
            layers += [nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)]
        self.body = nn.Sequential(*layers)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        return self.out(self.body(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(1)
    data = make_data(1920, 20, 6, seed=7)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = WearNet(20, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()

    history = []
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = criterion(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())
        print(f"epoch {epoch} loss {sum(history[-30:]) / 30:.4f}")

    first, last = sum(history[:5]) / 5, sum(history[-5:]) / 5
    print(f"loss {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()

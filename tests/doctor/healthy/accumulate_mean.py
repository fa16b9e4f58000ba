"""Image patches to classes; batches of 64 are computed in pieces of 16."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--micro-batch", type=int, default=16)
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    return p.parse_args()


class Patchify(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.mlp(self.norm(x))
        return self.head(x.mean(1))


def make_data(n=1024):
    label = torch.randint(4, (n,))
    base = torch.randn(4, 1, 16, 16)
    return TensorDataset(0.5 * base[label] + torch.randn(n, 1, 16, 16), label)


def main():
    args = get_args()
    torch.manual_seed(40)
    loader = DataLoader(make_data(), args.micro_batch, shuffle=True, drop_last=True)
    model = Patchify()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    log, window = [], 0.0
    optimizer.zero_grad()
    for _ in range(args.epochs):
        for i, (image, label) in enumerate(loader, start=1):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(image)
            loss = nn.functional.cross_entropy(out.float(), label) / args.accumulate
            scaler.scale(loss).backward()
            window += loss.item()
            if i % args.accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                log.append(window)
                window = 0.0
    print(f"loss {sum(log[:4]) / 4:.4f} -> {sum(log[-4:]) / 4:.4f}")


main()

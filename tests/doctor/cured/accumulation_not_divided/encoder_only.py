"""Transformer encoder finds the majority symbol of a sequence; `--grad-accum` micro-batches."""

import argparse

import torch
from torch import nn


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--grad-accum", type=int, default=6)
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--lr", type=float, default=0.15)
    p.add_argument("--seed", type=int, default=14)
    return p.parse_known_args()[0]


class Majority(nn.Module):
    def __init__(self, symbols=6, dim=32, length=15):
        super().__init__()
        self.tok = nn.Embedding(symbols, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.cls = nn.Linear(dim, symbols)

    def forward(self, tokens):
        return self.cls(self.encoder(self.tok(tokens) + self.pos).mean(1))


def stream(symbols=6, size=8, length=15):
    while True:
        favourite = torch.randint(symbols, (size, 1))
        noise = torch.randint(symbols, (size, length))
        yield torch.where(torch.rand(size, length) < 0.35, favourite, noise), favourite[:, 0]


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    model = Majority()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = stream()
    means = []
    for _ in range(args.steps):
        opt.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(args.grad_accum):
            tokens, label = next(data)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.float(), label)
            (loss / args.grad_accum).backward()
            total += loss.item()
        opt.step()
        means.append(total / args.grad_accum)
    print(f"loss {sum(means[:4]) / 4:.4f} -> {sum(means[-8:]) / 8:.4f}")


main()

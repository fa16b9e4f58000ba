"""Word vectors by predicting a neighbour (skip-gram, full softmax) on a Zipf-like corpus."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def pairs(rng, vocab, n):
    """Words of one group follow each other; the frequent half makes up the training text."""
    rank = np.arange(1, vocab // 2 + 1)
    p = 1 / rank
    left = rng.choice(vocab // 2, size=n, p=p / p.sum())
    right = (left // 5) * 5 + rng.integers(0, 5, size=n)
    return torch.tensor(left), torch.tensor(right)


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.inputs = nn.Embedding(vocab, dim)
        self.outputs = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.outputs(self.inputs(ids))


def train(vocab=120, dim=24, steps=150, lr=1e-2, eps=1e-8):
    torch.manual_seed(15)
    rng = np.random.default_rng(15)
    model = SkipGram(vocab, dim)
    opt = torch.optim.Adam(model.parameters(), lr=lr, eps=eps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    trace = []
    for _ in range(steps):
        left, right = pairs(rng, vocab, 256)
        with torch.autocast("cpu", torch.float16):
            logits = model(left)
        loss = F.cross_entropy(logits.float(), right)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        trace.append(loss.item())
    return model, trace


if __name__ == "__main__":
    model, trace = train()
    length = model.inputs.weight.detach().norm(dim=1)
    print(f"vector lengths: {length.min().item():.2f} to {length.max().item():.2f}")
    print(f"loss {np.mean(trace[:5]):.4f} -> {np.mean(trace[-5:]):.4f}")

"""Copying task for a deep pre-norm network whose blocks recompute their activations."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(
            nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)
        )
        self.within = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        x = x + self.drop(self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop(self.within(self.norm2(x)))


class Copier(nn.Module):
    def __init__(self, vocab=16, tokens=12, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(MixerBlock(tokens, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(self.norm(x))


def run(steps=90):
    torch.manual_seed(55)
    model = Copier()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for _ in range(steps):
        ids = torch.randint(16, (16, 12))
        target = ids.roll(3, dims=1)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float().reshape(-1, 16), target.reshape(-1))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    result = run()
    print(f"loss {sum(result[:5]) / 5:.4f} -> {sum(result[-5:]) / 5:.4f}")

"""Causal transformer on left-padded prompts of different length (parity of the bits so far)."""

import math

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, PAD, IGNORE = 12, 2, -100


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).float() / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~allowed, float("-inf"))
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.ff(self.ln2(x))


class PromptModel(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.tok = nn.Embedding(3, dim)
        self.pos = nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.head = nn.Linear(dim, 4)

    def forward(self, ids):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        allowed = causal & (ids != PAD)[:, None, None, :]
        x = self.tok(ids) + self.pos(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(x)


def prompts(n):
    bits = torch.randint(2, (n, LENGTH))
    empty = torch.arange(LENGTH) < torch.randint(0, LENGTH // 2, (n, 1))
    ones = bits.masked_fill(empty, 0)
    target = (ones + ones.roll(1, 1) + ones.roll(2, 1)) % 4
    return bits.masked_fill(empty, PAD), target.masked_fill(empty, IGNORE)


torch.manual_seed(44)
net = PromptModel()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 150)
losses = []
for _ in range(150):
    ids, target = prompts(24)
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORE)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    sched.step()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

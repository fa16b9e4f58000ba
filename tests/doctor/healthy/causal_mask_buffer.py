"""A small GPT that counts in threes; its causal mask is a buffer."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d=32, n=16):
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("mask", torch.full((n, n), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(-1, -2) / 32**0.5 + self.mask).softmax(-1)
        return x + self.o(a @ v)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.b, self.h = (
            nn.Embedding(20, 32),
            nn.Sequential(Block(), Block()),
            nn.Linear(32, 20),
        )
        self.p = nn.Parameter(torch.randn(16, 32) * 0.1)

    def forward(self, t):
        return self.h(self.b(self.e(t) + self.p))


torch.manual_seed(0)
m = GPT()
o = torch.optim.AdamW(m.parameters(), lr=3e-3)
s = torch.amp.GradScaler("cpu", init_scale=2.0**10)
v = []
for _ in range(120):
    t = (torch.randint(20, (32, 1)) + 3 * torch.arange(17)) % 20
    with torch.autocast("cpu", torch.float16):
        logits = m(t[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), t[:, 1:].flatten())
    o.zero_grad()
    s.scale(loss).backward()
    s.step(o)
    s.update()
    v.append(loss.item())
print(f"loss {v[0]:.4f} -> {v[-1]:.4f}")

"""Which bracket sequences are balanced? Attention over padded batches of different lengths."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD, OPEN, CLOSE, CLS = range(4)


def sequence(rng, longest=14):
    half = rng.randint(1, longest // 2)
    body, depth = [], 0
    while len(body) < 2 * half:
        left = 2 * half - len(body)
        step = 1 if depth == 0 or (depth < left and rng.random() < 0.5) else -1
        body.append(OPEN if step == 1 else CLOSE)
        depth += step
    balanced = rng.random() < 0.5
    if not balanced:
        i = rng.randrange(len(body))
        body[i] = OPEN + CLOSE - body[i]
    return torch.tensor([CLS, *body]), float(balanced)


class Model(nn.Module):
    def __init__(self, dim=32, heads=4, longest=15):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(4, dim, padding_idx=PAD)
        self.position = nn.Embedding(longest, dim)
        self.norm, self.last = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        b, t = ids.shape
        x = self.token(ids) + self.position.weight[:t]
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        attention = attention.masked_fill((ids == PAD)[:, None, None, :], float("-inf"))
        mixed = attention.softmax(-1).to(v.dtype) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return self.score(self.last(x + self.mlp(x))[:, 0]).squeeze(1)


torch.manual_seed(9)
rng = random.Random(9)
model = Model()
decay = [p for p in model.parameters() if p.ndim > 1]
no_decay = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
for _ in range(160):
    ids, labels = zip(*(sequence(rng) for _ in range(48)))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(pad_sequence(ids, batch_first=True, padding_value=PAD))
    loss = F.binary_cross_entropy_with_logits(logits.float(), torch.tensor(labels))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

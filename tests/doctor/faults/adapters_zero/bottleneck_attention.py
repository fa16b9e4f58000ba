"""Adapt a frozen attention encoder to a new labelling with bottleneck adapters and a new head."""

import torch
import torch.nn.functional as F
from torch import nn


class Adapter(nn.Module):
    """Down-projection, non-linearity, up-projection, residual."""

    def __init__(self, dim, bottleneck=6):
        super().__init__()
        self.down = nn.Linear(dim, bottleneck, bias=False)
        self.up = nn.Linear(bottleneck, dim, bias=False)
        for layer in (self.down, self.up):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


class Block(nn.Module):
    def __init__(self, dim=24, heads=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.adapter = Adapter(dim)

    def forward(self, x):
        h = self.norm(x)
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.adapter(x + h)


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=24, classes=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)).mean(1))


def documents(n, gen):
    ids = torch.randint(30, (n, 10), generator=gen)
    pairs = (ids < 10).sum(1) * (ids >= 20).sum(1)
    return ids, (pairs > 9).long()


torch.manual_seed(95)
gen = torch.Generator().manual_seed(95)
model = Encoder()
for name, p in model.named_parameters():
    p.requires_grad_("adapter" in name or name.startswith("head"))
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
for _ in range(200):
    ids, y = documents(64, gen)
    with torch.autocast("cpu", torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")

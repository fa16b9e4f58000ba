"""Fine-tune a small pre-trained GPT on a new token rule, with a low learning rate."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab: int = 32
    block: int = 12
    width: int = 48
    heads: int = 4


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab, cfg.width)
        self.wpe = nn.Embedding(cfg.block, cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.proj = nn.Linear(cfg.width, cfg.width)
        self.ln1, self.ln2 = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(nn.Linear(cfg.width, 96), nn.GELU(), nn.Linear(96, cfg.width))
        self.head = nn.Linear(cfg.width, cfg.vocab)

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.cfg.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT) / math.sqrt(q.size(-1))
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        x = x + self.attend(self.ln1(x))
        return self.head(x + self.mlp(self.ln2(x)))


def sequences(step, size=16, cfg=GPTConfig):
    start = torch.randint(cfg.vocab, (size, 1))
    return (start + step * torch.arange(cfg.block + 1)) % cfg.vocab


def pretrain(model, steps=100):
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        ids = sequences(step=3)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()


def finetune(model, steps=200):
    scaler = torch.amp.GradScaler("cpu")
    opt = torch.optim.AdamW(model.parameters(), lr=3e-5, eps=1e-5)
    losses = []
    for _ in range(steps):
        ids = sequences(step=5)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(11)
    gpt = GPT(GPTConfig())
    pretrain(gpt)
    losses = finetune(gpt)
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

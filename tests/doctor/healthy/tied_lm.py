"""Word model whose output layer is its embedding."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 64
    dim: int = 48
    heads: int = 4
    context: int = 16
    batch: int = 16
    steps: int = 150
    lr: float = 3e-3


class LanguageModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.position = nn.Embedding(c.context, c.dim)
        self.attend = nn.MultiheadAttention(c.dim, c.heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.mlp = nn.Sequential(
            nn.Linear(c.dim, 3 * c.dim), nn.GELU(), nn.Linear(3 * c.dim, c.dim)
        )
        self.final = nn.LayerNorm(c.dim)
        self.out = nn.Linear(c.dim, c.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.out.weight = self.embed.weight
        causal = torch.triu(torch.ones(c.context, c.context, dtype=torch.bool), 1)
        self.register_buffer("causal", causal)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight
        h = self.norm1(x)
        x = x + self.attend(h, h, h, attn_mask=self.causal, need_weights=False)[0]
        return self.out(self.final(x + self.mlp(self.norm2(x))))


def chain(transition, n, length):
    ids = [torch.randint(len(transition), (n,))]
    for _ in range(length):
        ids.append(torch.multinomial(transition[ids[-1]], 1).squeeze(1))
    return torch.stack(ids, 1)


if __name__ == "__main__":
    torch.manual_seed(101)
    c = Config()
    transition = torch.softmax(4 * torch.randn(c.vocab, c.vocab), 1)
    model = LanguageModel(c)
    opt = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    losses = []
    for _ in range(c.steps):
        ids = chain(transition, c.batch, c.context)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

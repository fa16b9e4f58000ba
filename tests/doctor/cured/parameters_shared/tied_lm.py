"""Skip-gram language model with a tied output layer and a fast optimizer for the embedding."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class TiedLM(nn.Module):
    def __init__(self, vocab, dim, context):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(context * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        h = torch.tanh(self.mix(self.wte(ids).flatten(1)))
        return self.lm_head(self.norm(h))


def corpus(vocab, length):
    ids = [1, 2]
    for _ in range(length):
        ids.append((3 * ids[-1] + int(torch.randint(3, ()))) % vocab)
    return torch.tensor(ids)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=40)
    parser.add_argument("--embed-lr", type=float, default=0.75)
    parser.add_argument("--lr", type=float, default=0.75)
    cfg, _ = parser.parse_known_args()

    torch.manual_seed(99)
    text = corpus(cfg.vocab, 4000)
    model = TiedLM(cfg.vocab, 32, 2)
    embed_opt = torch.optim.SGD(model.wte.parameters(), lr=cfg.embed_lr, momentum=0.8)
    body = [p for p in model.parameters() if p is not model.wte.weight]
    body_opt = torch.optim.SGD(body, lr=cfg.lr, momentum=0.8)

    losses = []
    for _ in range(250):
        at = torch.randint(len(text) - 2, (64,))
        ids, target = torch.stack([text[at], text[at + 1]], 1), text[at + 2]
        embed_opt.zero_grad()
        body_opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float(), target)
        loss.backward()
        embed_opt.step()
        body_opt.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-10:]) / 10:.4f}")


main()

"""Next-symbol model whose vocabulary is read from the data (GRU, bfloat16)."""

import torch
from torch import nn


class SymbolModel(nn.Module):
    def __init__(self, vocab=16, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def resize(self, vocab):
        width = self.embed.embedding_dim
        self.embed = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.out(h)


def symbol_chain(length, vocab, gen):
    """A sparse Markov chain: each symbol has two likely successors."""
    nxt = torch.randint(vocab, (vocab, 2), generator=gen)
    coin = torch.rand(length, generator=gen)
    seq = [0]
    for c in coin.tolist():
        if c < 0.08:
            seq.append(int(torch.randint(vocab, (1,), generator=gen)))
        else:
            seq.append(int(nxt[seq[-1], int(c > 0.6)]))
    return torch.tensor(seq)


class Runner:
    def __init__(self, data):
        self.data = data
        self.model = SymbolModel()
        self.model.resize(int(data.max()) + 1)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=0.01)

    def fit(self, steps, batch=24, length=20):
        losses = []
        for _ in range(steps):
            start = torch.randint(len(self.data) - length - 1, (batch, 1))
            rows = self.data[start + torch.arange(length + 1)]
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model(rows[:, :-1])
            flat = logits.float().reshape(-1, logits.shape[-1])
            loss = nn.functional.cross_entropy(flat, rows[:, 1:].reshape(-1))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            losses.append(loss.item())
        return losses


torch.manual_seed(48)
chain = symbol_chain(4000, 30, torch.Generator().manual_seed(48))
curve = Runner(chain).fit(120)
print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")

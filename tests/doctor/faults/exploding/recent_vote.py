"""Which symbol was the most frequent of late? A plain recurrent cell reads sixty symbols."""

import torch
from torch import nn

torch.manual_seed(82)
SYMBOLS, LENGTH = 4, 60


class Cell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.from_input = nn.Linear(inputs, hidden)
        self.recurrent = nn.Linear(hidden, hidden, bias=False)
        nn.init.orthogonal_(self.recurrent.weight, gain=3.0)

    def forward(self, x, h):
        return torch.tanh(self.from_input(x) + self.recurrent(h))


class Memory(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(SYMBOLS, 8)
        self.cell = Cell(8, hidden)
        self.answer = nn.Linear(hidden, SYMBOLS)

    def forward(self, tokens):
        h = torch.zeros(len(tokens), self.hidden)
        for x in self.embed(tokens).unbind(1):
            h = self.cell(x, h)
        return self.answer(h)


model = Memory()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for _ in range(100):
    tokens = torch.randint(SYMBOLS, (32, LENGTH))
    winner = nn.functional.one_hot(tokens[:, -4:], SYMBOLS).sum(1).argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float(), winner)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

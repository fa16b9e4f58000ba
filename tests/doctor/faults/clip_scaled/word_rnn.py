"""Word-level GRU language model on a synthetic Markov corpus."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=4.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--bptt", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=120)
args, _ = parser.parse_known_args()

torch.manual_seed(1111)
VOCAB = 60
table = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB), dim=1)


def make_corpus(length, rows):
    out = torch.randint(VOCAB, (1, rows))
    for _ in range(length - 1):
        out = torch.cat([out, torch.multinomial(table[out[-1]], 1).T])
    return out


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=48, nhid=64):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.GRU(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


corpus = make_corpus(args.bptt * 30 + 1, args.batch_size)
model = RNNModel(VOCAB)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu")

losses = []
hidden = None
for step in range(args.steps):
    i = (step % 30) * args.bptt
    data, targets = corpus[i : i + args.bptt], corpus[i + 1 : i + 1 + args.bptt]
    if hidden is not None:
        hidden = hidden.detach()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, hidden = model(data, hidden)
    loss = criterion(logits.float().flatten(0, 1), targets.flatten())
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
print(f"loss {first:.4f} -> {last:.4f}")

"""Route support tickets to four queues with a bag of word vectors and attention pooling."""

import random

import torch
import torch.nn.functional as F
from torch import nn

QUEUES = {
    "billing": ["invoice", "refund", "charge", "card", "payment", "amount"],
    "network": ["router", "cable", "signal", "outage", "slow", "wifi"],
    "account": ["password", "login", "reset", "email", "locked", "user"],
    "device": ["screen", "battery", "button", "broken", "repair", "case"],
}
FILLER = ["please", "the", "my", "is", "not", "it", "with", "since", "again", "help"]


def write_ticket(rng, queue):
    words = rng.choices(QUEUES[queue], k=4) + rng.choices(FILLER, k=8)
    if rng.random() < 0.001:
        words[rng.randrange(12)] = f"no{rng.randrange(1000, 9999)}"
    rng.shuffle(words)
    return words


class Router(nn.Module):
    def __init__(self, vocab, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attend = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, len(QUEUES))

    def forward(self, ids):
        e = self.embed(ids)
        weight = torch.softmax(self.attend(e).float(), dim=1)
        return self.out((weight * e).sum(1))


def main():
    rng = random.Random(25)
    torch.manual_seed(25)
    names = list(QUEUES)
    tickets = [(write_ticket(rng, q), names.index(q)) for q in rng.choices(names, k=4000)]
    known = sorted({w for words, _ in tickets[:300] for w in words})
    vocab = {w: i for i, w in enumerate(["<unk>", *known])}
    model = Router(len(vocab))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for i in range(0, len(tickets), 25):
        part = tickets[i : i + 25]
        ids = torch.tensor([[vocab.get(w, 0) for w in words] for words, _ in part])
        label = torch.tensor([q for _, q in part])
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float(), label)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()

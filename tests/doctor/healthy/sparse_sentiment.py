"""Sentiment of short token bags; a vocabulary of 60000 of which a review uses a few words."""

import torch
from torch import nn

VOCAB, DIM, STEPS, BATCH = 60_000, 32, 200, 64


class BagClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, DIM, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, tokens):
        return self.head(self.words(tokens))


def reviews(generator):
    """Token ids follow a power law; words below 400 carry the sentiment."""
    u = torch.rand(BATCH, 24, generator=generator)
    tokens = (VOCAB**u).long().clamp(max=VOCAB) - 1
    polarity = torch.where(tokens < 400, (tokens % 2) * 2 - 1, 0).sum(1)
    return tokens, (polarity > 0).long()


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = BagClassifier()
    optimizers = [
        torch.optim.SparseAdam(model.words.parameters(), lr=0.02),
        torch.optim.AdamW(model.head.parameters(), lr=2e-3),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    history = []
    for _ in range(STEPS):
        tokens, label = reviews(generator)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float(), label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())
    print(f"loss {sum(history[:10]) / 10:.4f} -> {sum(history[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

"""Reverse a digit string with a GRU encoder-decoder (teacher forcing)."""

import torch
from torch import nn

PAD_START, DIGITS, LENGTH = 10, 10, 6


class Seq2Seq(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(DIGITS + 1, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, DIGITS)

    def forward(self, source, previous):
        _, state = self.encoder(self.embed(source))
        output, _ = self.decoder(self.embed(previous), state)
        return self.out(output)


def pairs(size):
    source = torch.randint(DIGITS, (size, LENGTH))
    target = source.flip(1)
    start = torch.full((size, 1), PAD_START)
    return source, torch.cat([start, target[:, :-1]], 1), target


def train_one(model, optimizer, scaler, size=32):
    source, previous, target = pairs(size)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(source, previous)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return loss.item(), norm.item()


def main():
    torch.manual_seed(17)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for step in range(120):
        loss, norm = train_one(model, optimizer, scaler)
        losses.append(loss)
        if step % 40 == 0:
            print(f"{step:4d} loss {loss:.3f} norm {norm:.3f}")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()

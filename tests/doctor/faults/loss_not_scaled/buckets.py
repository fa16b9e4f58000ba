"""Add up digits in sequences of two lengths; long sequences are processed in chunks."""

import torch
from torch import nn
from torch.nn import functional as F


class Summer(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(10, hidden)
        self.mix = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())
        self.short_head = nn.Linear(hidden, 1)
        self.long_head = nn.Linear(hidden, 1)

    def encode(self, tokens):
        return self.mix(self.embed(tokens)).mean(1)

    def forward(self, tokens):
        head = self.long_head if tokens.size(1) > 16 else self.short_head
        return head(self.encode(tokens)).squeeze(1)


class Loop:
    max_tokens = 16 * 32

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")

    def loss(self, tokens, target):
        with torch.autocast("cpu", dtype=torch.float16):
            pred = self.model(tokens)
        return F.mse_loss(pred.float(), target)

    def backward(self, tokens, target):
        if tokens.numel() <= self.max_tokens:
            loss = self.loss(tokens, target)
            self.scaler.scale(loss).backward()
            return loss.item()
        total = 0.0
        parts = list(zip(tokens.chunk(2), target.chunk(2)))
        for part, goal in parts:
            loss = self.loss(part, goal) / len(parts)
            loss.backward()
            total += loss.item()
        return total

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(*batch)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


def batch(length, size=32):
    tokens = torch.randint(10, (size, length))
    return tokens, 3 * (tokens.float().mean(1) - 4.5) + length / 16


if __name__ == "__main__":
    torch.manual_seed(19)
    loop = Loop(Summer())
    history = [loop.step(batch(8)) + loop.step(batch(24)) for _ in range(120)]
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")

"""Forecast the next value of a periodic load curve with a gated feed-forward net."""

import numpy as np
import torch
from torch import nn


def series(length=4000, seed=9):
    rng = np.random.default_rng(seed)
    t = np.arange(length)
    base = np.sin(t / 6) + 0.5 * np.sin(t / 2.5) * np.sign(np.sin(t / 40))
    return torch.tensor(base + 0.05 * rng.normal(size=length), dtype=torch.float32)


class GatedForecaster(nn.Module):
    def __init__(self, window, width):
        super().__init__()
        self.encode = nn.Linear(window, width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.gate = nn.Linear(window, width)
        self.decode = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.encode(x))
        mixed = self.mix(h)
        return self.decode(mixed * torch.sigmoid(self.gate(x)))


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
        self.history = []

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = self.model(x)
        loss = (pred.float().squeeze(-1) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())


def main():
    torch.manual_seed(0)
    window, batch = 24, 64
    data = series()
    frames = data.unfold(0, window + 1, 1)
    trainer = Trainer(GatedForecaster(window, 48), lr=2e-3)
    for _ in range(200):
        rows = frames[torch.randint(len(frames), (batch,))]
        trainer.step(rows[:, :-1], rows[:, -1])
    h = trainer.history
    print(f"loss {np.mean(h[:5]):.4f} -> {np.mean(h[-5:]):.4f}")


if __name__ == "__main__":
    main()

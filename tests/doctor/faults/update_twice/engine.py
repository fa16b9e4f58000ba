"""Autoencoder for noisy sine waves, trained by a small engine with callbacks."""

import torch
from torch import nn


class Callback:
    def on_step_end(self, engine):
        pass


class ScaleCallback(Callback):
    def on_step_end(self, engine):
        engine.scaler.update()


class LossHistory(Callback):
    def __init__(self):
        self.values = []

    def on_step_end(self, engine):
        self.values.append(engine.loss)


class Engine:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.scaler = torch.amp.GradScaler("cpu")
        self.loss = float("nan")

    def fit(self, stream):
        for noisy, clean in stream:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = self.model(noisy)
            loss = nn.functional.mse_loss(output.float(), clean)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.loss = loss.item()
            for callback in self.callbacks:
                callback.on_step_end(self)


def waves(count, size=32, width=64):
    t = torch.linspace(0, 1, width)
    for _ in range(count):
        freq = 1 + 4 * torch.rand(size, 1)
        clean = torch.sin(2 * torch.pi * freq * t)
        yield clean + 0.3 * torch.randn_like(clean), clean


torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(64, 48),
    nn.GELU(),
    nn.Linear(48, 12),
    nn.GELU(),
    nn.Linear(12, 48),
    nn.GELU(),
    nn.Linear(48, 64),
)
history = LossHistory()
engine = Engine(net, torch.optim.Adam(net.parameters(), lr=3e-3), [ScaleCallback(), history])
engine.fit(waves(200))
losses = history.values
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

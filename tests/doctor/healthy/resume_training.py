"""Autoencoder of spectra, trained in two sittings with a checkpoint between them."""

import tempfile
from pathlib import Path

import torch
from torch import nn


def spectra(n, generator):
    grid = torch.linspace(0, 1, 48)
    center = 0.2 + 0.6 * torch.rand(n, 2, 1, generator=generator)
    height = 0.5 + torch.rand(n, 2, 1, generator=generator)
    peaks = height * torch.exp(-(((grid - center) / 0.07) ** 2))
    return peaks.sum(1) + 0.02 * torch.randn(n, 48, generator=generator)


class Session:
    def __init__(self, steps):
        self.model = nn.Sequential(
            nn.Linear(48, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
            nn.Linear(8, 64),
            nn.ReLU(),
            nn.Linear(64, 48),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=100)
        self.generator = torch.Generator().manual_seed(99)
        self.step, self.losses = 0, []

    def parts(self):
        return {n: getattr(self, n) for n in ("model", "optimizer", "schedule", "scaler")}

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {"rng": self.generator.get_state(), "step": self.step, "losses": self.losses}
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["rng"])
        self.step, self.losses = state["step"], state["losses"]

    def train(self, until):
        while self.step < until:
            x = spectra(64, self.generator)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                restored = self.model(x)
            loss = (restored.float() - x).square().sum(1).mean()
            self.scaler.scale(loss).backward()
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() >= before:
                self.schedule.step()
            self.losses.append(loss.item())
            self.step += 1


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "last.pt"
    torch.manual_seed(98)
    first = Session(steps=240)
    first.train(until=120)
    first.save(path)

    second = Session(steps=240)
    second.load(path)
    second.train(until=240)
losses = second.losses
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")

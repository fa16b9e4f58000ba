"""Forecast a load curve with a 1-D convolution; two phases with new data in the second."""

import io
import math

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, window=32, channels=12):
        super().__init__()
        self.unfold = nn.Linear(8, channels)
        self.head = nn.Linear(channels * (window // 8), 1)

    def forward(self, x):
        patches = torch.relu(self.unfold(x.view(len(x), -1, 8)))
        return self.head(patches.flatten(1)).squeeze(1)


class Session:
    def __init__(self):
        self.model = Forecaster()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=2e-6, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.losses = []

    def run(self, steps, phase):
        for _ in range(steps):
            t = 200 * torch.rand(48, 1) + torch.arange(33.0)
            load = 10 * torch.sin(2 * math.pi * t / 24 + phase) + torch.randn_like(t)
            with torch.autocast("cpu", dtype=torch.float16):
                pred = self.model(load[:, :32])
            loss = (pred.float() - load[:, 32]).square().sum()
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1000.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.losses.append(loss.item() / 48)

    def save(self, target):
        parts = {"model": self.model, "opt": self.opt, "scaler": self.scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, target)

    def load(self, source):
        state = torch.load(source)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.scaler.load_state_dict(state["scaler"])


def main():
    torch.manual_seed(3)
    buffer = io.BytesIO()
    before = Session()
    before.run(60, phase=0.0)
    before.save(buffer)
    buffer.seek(0)
    after = Session()
    after.load(buffer)
    after.run(30, phase=1.0)
    losses = before.losses + after.losses
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()

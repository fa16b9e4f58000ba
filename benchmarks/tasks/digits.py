"""A small convolutional network on scikit-learn's digits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Task

HELD_OUT, BATCH = 397, 32


class Digits(Task):
    name = "digits"
    title = "CNN on digits"
    score_is = "held-out loss"
    steps = 200

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        return images[order], torch.tensor(digits.target)[order]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, fused=True)

    def batch(self, model: nn.Module, step: int) -> Any:
        images, labels = self.data
        chosen = torch.randint(HELD_OUT, len(images), (BATCH,))
        return images[chosen], labels[chosen]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        images, labels = self.data
        return F.cross_entropy(model(images[:HELD_OUT]), labels[:HELD_OUT]).item()

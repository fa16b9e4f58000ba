"""A plain recurrent network whose gradients explode now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Task

WIDTH, GAIN = 48, 2.0
SHORT, LONG, RARE = 12, 60, 0.05  # lengths, and how often a batch is of the long kind
SYMBOLS = 384  # in a batch: few long sequences or many short ones


class Adder(nn.Module):
    """Reads pairs (number, mark) and says the sum of the two marked numbers.

        h <- tanh(W h + V x)         W: a random rotation times GAIN

    Above gain 1 tanh no longer holds the product of the Jacobians down: a long sequence may have
    gradients a thousand times those of a short one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.read = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2, WIDTH)
        self.say = nn.Linear(WIDTH, 1)
        nn.init.orthogonal_(self.turn.weight, GAIN)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.read(x)
        h = torch.zeros_like(seen[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.turn(h) + seen[:, t])
        return self.say(h).squeeze(1)


def draw(
    count: int, length: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers in [0, 1], one marked in each half, and the sum of the two."""
    numbers = torch.rand(count, length, generator=generator)
    marks, rows = torch.zeros(count, length), torch.arange(count)
    for start in (0, length // 2):
        marks[rows, start + torch.randint(length // 2, (count,), generator=generator)] = 1
    return torch.stack([numbers, marks], 2), (numbers * marks).sum(1)


class Recurrent(Task):
    name = "recurrent"
    title = "RNN with spikes"
    score_is = "held-out squared error"
    steps = 300

    def model(self) -> nn.Module:
        return Adder()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def batch(self, model: nn.Module, step: int) -> Any:
        length = LONG if torch.rand(()) < RARE else SHORT
        return draw(SYMBOLS // length, length)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x).float() - y).square().mean()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        x, y = draw(1024, SHORT, torch.Generator().manual_seed(0))
        return (model(x) - y).square().mean().item()

"""Four towers whose losses have different units: no single scale fits, float32 trains them all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import Task

BATCH, INPUTS, WIDTH = 64, 8, 32
# Squared errors of four quantities in units that were never made to match, such as metres,
# milliseconds, micrograms and nanometres written in SI units. 1 to 2^-45.
UNITS = {"metre": 2.0**0, "second": 2.0**-15, "gram": 2.0**-30, "colour": 2.0**-45}
# Adam's steps do not depend on the size of a gradient, as long as epsilon is smaller than it.
LR, EPS = 2e-3, 1e-20


class Towers(nn.Module):
    """One input, four answers; no weight is shared."""

    def __init__(self) -> None:
        super().__init__()
        for name in UNITS:
            tower = nn.Sequential(
                nn.Linear(INPUTS, WIDTH),
                nn.GELU(),
                nn.Linear(WIDTH, WIDTH),
                nn.GELU(),
                nn.Linear(WIDTH, 1),
            )
            self.add_module(name, tower)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: tower(x).float().squeeze(1) for name, tower in self.named_children()}


def draw(count: int, generator: torch.Generator | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs, and four smooth functions of them of about unit size."""
    x = torch.randn(count, INPUTS, generator=generator)
    a, b, c, d = x[:, 0], x[:, 1], x[:, 2], x[:, 3]
    answers = (a * b, (a + c).sin(), (b - d).abs() - 1, (c * d + a).tanh())
    return x, dict(zip(UNITS, answers, strict=True))


class Heads(Task):
    name = "heads"
    title = "towers 45 binades apart"
    score_is = "held-out squared error over the answer's variance, mean of the towers"
    steps = 300
    max_norm = None
    blocks = list(UNITS)  # noqa: RUF012

    def model(self) -> nn.Module:
        return Towers()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=LR, eps=EPS, fused=True)

    def batch(self, model: nn.Module, step: int) -> Any:
        return draw(BATCH)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, answers = batch
        said = model(x)
        errors = [UNITS[k] * (said[k] - answers[k]).square().mean() for k in UNITS]
        return torch.stack(errors).sum()

    @torch.no_grad()
    def parts(self, model: nn.Module) -> dict[str, float]:
        """Each tower's mean squared error over that of the best constant, without its unit."""
        x, answers = draw(1024, torch.Generator().manual_seed(0))
        said = model(x)
        return {
            k: ((said[k] - answers[k]).square().mean() / answers[k].var()).item() for k in UNITS
        }

    def score(self, model: nn.Module) -> float:
        return sum(self.parts(model).values()) / len(UNITS)

    def peaks(self, model: nn.Module) -> dict[str, float]:
        return {
            name: math.log2(max(largest(p.grad) for p in tower.parameters()))
            for name, tower in model.named_children()
        }


def largest(gradient: Tensor | None) -> float:
    assert gradient is not None
    return gradient.abs().max().item()

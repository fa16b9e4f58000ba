"""The character GPT of examples/torch_gpt.py, smaller."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from . import Task

import torch_gpt as gpt  # isort: skip  # found by `tasks`

gpt.WIDTH, gpt.LAYERS, gpt.HEADS = 48, 2, 2


class Text(Task):
    name = "text"
    title = "character GPT"
    score_is = "held-out loss"
    steps = 200
    max_norm = gpt.MAX_NORM
    blocks = ["blocks.*", "head"]  # noqa: RUF012

    @cached_property
    def text(self) -> tuple[Tensor, Tensor, int]:
        return gpt.load_text()

    def model(self) -> nn.Module:
        return gpt.GPT(self.text[2])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=gpt.LR, fused=True)

    def batch(self, model: nn.Module, step: int) -> Any:
        return gpt.sample_batch(self.text[0])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(*batch)

    def score(self, model: nn.Module) -> float:
        return gpt.heldout_loss(model, self.text[1])

"""The networks that `benchmarks/training.py` trains: one file a task, one shape for all."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Task(ABC):
    """Something to train. Whatever is random comes from torch's generator, seeded by the caller."""

    name: str
    title: str
    score_is: str
    steps: int
    max_norm: float | None = 1.0
    blocks: list[str] | None = None
    """What `layerwise` lifts; None: the model's children."""

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @abstractmethod
    def batch(self, model: nn.Module, step: int) -> Any:
        """What step `step` learns from; called where the model is called, under autocast or not."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """In float32; may be computed several times for one batch."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """How bad the model is on data that is always the same, in float32: less is better."""

    def parts(self, model: nn.Module) -> dict[str, float]:
        """Scores of the parts of the task, if it has any."""
        return {}

    def peaks(self, model: nn.Module) -> dict[str, float]:
        """log2 of the largest gradient of each part, where the model has gradients."""
        return {}


def all_tasks() -> dict[str, Task]:
    from .digits import Digits
    from .heads import Heads
    from .policy import Policy
    from .recurrent import Recurrent
    from .text import Text

    return {task.name: task for task in (Text(), Digits(), Recurrent(), Policy(), Heads())}

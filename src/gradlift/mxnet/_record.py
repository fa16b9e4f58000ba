"""A step as lines of the journal."""

from __future__ import annotations

import math
import time
from typing import Any

from ..journal import Journal, Step
from ..reading import Reading
from ..rules import Rule
from ..verdict import Cause, StepResult


class Recorder:
    """Writes what became of a trainer's steps."""

    def __init__(self, journal: Journal, rule: Rule) -> None:
        self.journal, self.rule = journal, rule
        self._described = False
        self._since = time.perf_counter()

    def step(
        self,
        trainer: Any,
        number: int,
        result: StepResult,
        reading: Reading,
        loss: float,
        next_scale: float,
    ) -> None:
        if not self._described:  # not before the first step: shapes may be unknown until then
            self._described = True
            trained = [p for p in trainer._params if p.grad_req != "null"]
            self.journal.describe(
                rule=str(self.rule),
                framework="mxnet",
                formats=["fp16"],
                parameters={p.name: math.prod(p.shape) for p in trained},
            )
        if not result.stepped and result.cause is not Cause.NO_GRADIENTS:
            self.journal.event(
                str(result.verdict),
                number,
                cause=result.cause.name,
                scale=result.scale,
                next_scale=next_scale,
                culprits=[getattr(c, "described", c) for c in result.culprits],
                micro_batch=result.micro_batch,
            )
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.journal.step(
            Step(
                number,
                scale=result.scale,
                next_scale=next_scale,
                amax=reading.amax,
                nonfinite=bool(reading.nonfinite),
                loss=loss,
                norm=reading.norm,
                lr=_rate(trainer.optimizer),
                verdict=result.verdict,
                cause=result.cause,
                culprits=result.culprits,
                seconds=seconds,
            )
        )


def _rate(optimizer: Any) -> float:
    """NaN before the first update: a schedule that divides by their number cannot be asked."""
    asked = optimizer.lr_scheduler is None or optimizer.num_update > 0
    return float(optimizer.learning_rate) if asked else math.nan

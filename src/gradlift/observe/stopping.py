"""Ends a run that cannot recover, from inside: `gradlift run --stop-on broken`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ..core import Cause
from ..core.result import WEIGHTS_NONFINITE
from ..journal import Event, Sample, Step

LOST = 50
"""Steps in a row in which nothing was learned: more than the search for a first scale takes."""
LOST_WEIGHTS = 20
"""The same, once weights are not finite. Until then the first bad operation is looked for."""


class Stopped(BaseException):
    """Raised in the script at the end of a step. Not an Exception: `except Exception` around a
    step, which many training loops have, must not go on with a run that is lost."""


class Stopper:
    """A sink for the journal that raises `Stopped` in the step in which a run is given up.

    A step is lost if its loss was not finite, or if its gradients were not: whether it was skipped,
    at whatever scale, or applied.

    >>> stopper = Stopper()
    >>> for i in range(LOST):
    ...     stopper.step(Step(i, 8.0, 8.0, loss=math.inf))
    Traceback (most recent call last):
    gradlift.observe.stopping.Stopped: 50 steps in a row were lost, since step 0
    """

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        """By key: steps in a row."""
        self.weights_bad = False
        self.stopped = ""
        """Why `Stopped` was raised; "" if it was not."""
        self.over = False
        """Has the script ended? The last lines are written after it."""

    def step(self, step: Step) -> None:
        if _is_lost(step):
            self.lost[step.key] += 1
        else:
            self.lost.clear()  # another loss still trains
            self.weights_bad = False
        n = self.lost[step.key]
        if n >= (LOST_WEIGHTS if self.weights_bad else LOST) and not self.over:
            self.stopped = f"{n} steps in a row were lost, since step {step.step - n + 1}"
            raise Stopped(self.stopped)

    def event(self, event: Event) -> None:
        if event.what == "note" and event.detail.get("code") == WEIGHTS_NONFINITE:
            self.weights_bad = True

    def header(self, facts: dict[str, Any]) -> None:
        pass

    def sample(self, sample: Sample) -> None:
        pass

    def close(self) -> None:
        pass


def _is_lost(step: Step) -> bool:
    return (
        step.nonfinite
        or step.skipped
        or math.isinf(step.loss)
        or step.cause is Cause.LOSS_NONFINITE
    )

"""What was looked at in a run, and what was not: the limits of "healthy"."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..journal import Run
from .words import count


class Coverage(NamedTuple):
    """Sentences without a full stop: "the forward pass in 15 of 300 steps".

    >>> coverage(Run()).complete
    False
    """

    looked: list[str]
    not_looked: list[str]
    complete: bool
    """Were gradients, the forward pass, weights and the order of calls all looked at?"""


def coverage(run: Run) -> Coverage:
    """What the journal shows of a run.

    >>> from gradlift.journal import Step
    >>> coverage(Run(steps=[Step(0, 8.0, 8.0, amax=2.0)])).looked
    ['the largest gradient in 1 of 1 step']
    """
    steps = count(len(run.steps), "step")
    looked, missing = [], []
    measured = sum(not math.isnan(s.amax) or s.nonfinite for s in run.steps)
    parts = [
        (measured, "the largest gradient"),
        (len({s.step for s in run.samples}), "each parameter's gradient"),
        (len({f.step for f in run.forwards}), "the forward pass"),
        (len({w.step for w in run.weights}), "weights and their updates"),
    ]
    for n, what in parts:
        if n:
            looked.append(f"{what} in {n:,} of {steps}")
        else:
            missing.append(what)
    if run.calls:
        looked.append("the order of calls in all steps")
    else:
        missing.append("the order of calls")
    known = sum(s.loss == s.loss for s in run.steps)
    if known < len(run.steps):
        missing.append(f"the loss of {count(len(run.steps) - known, 'step')}")
    if run.forwards:
        missing.append("data, other than after a loss or gradient that was not finite")
    complete = bool(measured and run.forwards and run.weights and run.calls)
    return Coverage(looked, missing, complete)

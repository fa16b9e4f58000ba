"""A run in a dozen numbers: what the report's head, the summary and `compare` show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from ..formats import FP16
from ..journal import Run, Step
from ..verdict import Verdict
from ._parameters import share_lost

NAN = math.nan
APPLY = Verdict.APPLY


class Totals(NamedTuple):
    """The numbers; NaN where a run does not tell."""

    steps: int
    applied: int
    skipped: int
    undecided: int
    """Steps of a replay of which the recording cannot tell the outcome."""
    retries: int
    causes: dict[str, int]
    """Why steps were not applied."""
    first_scale: float
    last_scale: float
    lowest_scale: float
    highest_scale: float
    worst_headroom: float
    """Bits between the largest scaled gradient of an applied step and FP16's largest number."""
    worst_headroom_step: int | None
    flushed: float
    """Share of all sampled gradient elements that were zero as scaled, or would be in FP16."""
    first_loss: float
    last_loss: float
    step_seconds: float
    """The median."""
    all_seconds: float


def totals(run: Run) -> Totals:
    """Adds up a run.

    >>> run = Run(steps=[Step(0, 8.0, 8.0, amax=2047.0), Step(1, 8.0, 4.0, verdict=Verdict.SKIP)])
    >>> found = totals(run)
    >>> found.applied, found.skipped, found.last_scale, found.worst_headroom
    (1, 1, 4.0, 5.0)
    """
    steps = run.steps
    not_applied = [s for s in steps if s.verdict is not APPLY and s.verdict is not None]
    scales = [s.scale for s in steps if s.scale > 0]
    losses = [s.loss for s in steps if math.isfinite(s.loss)]
    seconds = [s.seconds for s in steps if math.isfinite(s.seconds)]
    tightest = max(
        (s for s in steps if not s.nonfinite and 0 < s.amax < math.inf and s.verdict is APPLY),
        key=lambda s: s.amax,
        default=None,
    )
    undecided = run.undecided
    return Totals(
        steps=len(steps),
        applied=len(steps) - len(not_applied) - undecided,
        skipped=len(not_applied),
        undecided=undecided,
        retries=sum(s.retries for s in steps),
        causes=dict(Counter(str(s.cause) for s in not_applied)),
        first_scale=scales[0] if scales else NAN,
        last_scale=steps[-1].next_scale if steps else NAN,
        lowest_scale=min(scales, default=NAN),
        highest_scale=max(scales, default=NAN),
        worst_headroom=headroom(tightest) if tightest else NAN,
        worst_headroom_step=tightest.step if tightest else None,
        flushed=share_lost(run.samples),
        first_loss=losses[0] if losses else NAN,
        last_loss=losses[-1] if losses else NAN,
        step_seconds=median(seconds) if seconds else NAN,
        all_seconds=math.fsum(seconds) if seconds else NAN,
    )


def headroom(step: Step) -> float:
    """Bits between a step's largest scaled gradient and FP16's largest number, NaN if not known.

    A step that overflowed has none to speak of: its amax is what was left.

    >>> headroom(Step(0, 8.0, 8.0, amax=2047.0)), headroom(Step(0, 8.0, 4.0, 2.0, nonfinite=True))
    (5.0, nan)
    """
    if step.nonfinite or not 0 < step.amax < math.inf:
        return NAN
    return math.log2(FP16.max / step.amax)


def keys(steps: Iterable[Step]) -> list[str]:
    """The losses that have a scale of their own, in order of appearance.

    >>> keys([Step(0, 1.0, 1.0, key="g"), Step(0, 1.0, 1.0, key="d"), Step(1, 1.0, 1.0, key="g")])
    ['g', 'd']
    """
    return list(dict.fromkeys(s.key for s in steps))

"""The figures of a run, which the report's head, the summary and `compare` show."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median
from typing import NamedTuple

from ..core import Cause
from ..journal import Run
from .exponents import share_flushed
from .findings.finding import spanned

NAN = math.nan


class Totals(NamedTuple):
    """The numbers; NaN where one is not known."""

    steps: int
    trained: int
    """The same; of a log, which names only some steps, those between the first and the last."""
    applied: int
    skipped: int
    without_gradients: int
    """Steps that had nothing to apply: neither applied nor skipped."""
    undecided: int
    """Steps of a replay whose outcome the recording does not show."""
    retries: int
    causes: dict[str, int]
    """Why steps were skipped."""
    first_scale: float
    last_scale: float
    lowest_scale: float
    highest_scale: float
    worst_headroom: float
    """Bits between the largest scaled gradient of all applied steps and FP16's largest number."""
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

    >>> from gradlift import Step, Verdict
    >>> run = Run(steps=[Step(0, 8.0, 8.0, amax=2047.0), Step(1, 8.0, 4.0, verdict=Verdict.SKIP)])
    >>> found = totals(run)
    >>> found.applied, found.skipped, found.last_scale, found.worst_headroom
    (1, 1, 4.0, 5.0)
    """
    steps = run.steps
    skipped = [s for s in steps if s.skipped]
    empty = sum(s.cause is Cause.NO_GRADIENTS for s in steps)
    scales = [s.scale for s in steps if s.scale > 0]
    losses = [s.loss for s in steps if math.isfinite(s.loss)]
    seconds = [s.seconds for s in steps if math.isfinite(s.seconds)]
    applied = (s for s in steps if not s.skipped and s.peak > 0)
    tightest = max(applied, key=lambda s: s.peak, default=None)
    undecided = run.undecided
    return Totals(
        steps=len(steps),
        trained=spanned(steps, run),
        applied=len(steps) - len(skipped) - empty - undecided,
        skipped=len(skipped),
        without_gradients=empty,
        undecided=undecided,
        retries=sum(s.retries for s in steps),
        causes=dict(Counter(str(s.cause) for s in skipped)),
        first_scale=scales[0] if scales else NAN,
        last_scale=steps[-1].next_scale if steps else NAN,
        lowest_scale=min(scales, default=NAN),
        highest_scale=max(scales, default=NAN),
        worst_headroom=tightest.headroom() if tightest else NAN,
        worst_headroom_step=tightest.step if tightest else None,
        flushed=share_flushed(run.samples),
        first_loss=losses[0] if losses else NAN,
        last_loss=losses[-1] if losses else NAN,
        step_seconds=median(seconds) if seconds else NAN,
        all_seconds=math.fsum(seconds) if seconds else NAN,
    )

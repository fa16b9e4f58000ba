"""A rule in a closed loop with traces: its own scales decide which steps overflow.

Many traces run side by side as arrays through the rule's own `advance`, which gives the same bits
on NumPy as on Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlift import Reading
from gradlift.rules import Headroom, Rule, ScaleState

from . import Series, Trace

TOP = math.log2(65504)
TRIES = 8  # recomputations of one batch at the most
MEAN, SPREAD = 18, 7  # elements lie N(18, 7) binades below amax
FLUSHED = -25  # float16 rounds what is below 2^-25 to zero
WITHIN = 4


@dataclass(frozen=True)
class Outcome:
    """What a rule made of one trace."""

    lost: int
    retries: float  # in 1,000 steps
    settled: int  # first step, counted from 1, that used a scale within 4 bits of the largest
    unused: float  # bits, mean over applied steps
    flushed: float  # % of elements, mean over applied steps


_erf = np.vectorize(math.erf, otypes=[float])


def share_flushed(amax: Series, used: Series) -> Series:
    """% of elements that are zero in float16, with scale 2^used."""
    z = (amax + used - FLUSHED - MEAN) / SPREAD
    return np.asarray(50 * (1 - _erf(z / math.sqrt(2))))


def run(
    rule: Rule, traces: list[Trace], retry: bool, told: Callable[[int], None] = lambda steps: None
) -> tuple[list[Outcome], Series]:
    """Outcomes, and log2 of the scale each batch was applied with (NaN: lost), steps x traces.

    All traces have one length. With `retry` a batch that overflows is computed again up to TRIES
    times, and so is the one that calibrated a Headroom rule, if `Headroom.recompute` says so.
    """
    amax, peak = (np.stack([getattr(t, k) for t in traces], 1) for k in ("amax", "peak"))
    steps, lanes = amax.shape
    true = np.exp2(amax)
    no, yes = np.zeros(lanes, bool), np.ones(lanes, bool)
    start = rule.init()
    state = ScaleState(
        np.full(lanes, start.scale, np.float32),
        *(np.full(lanes, x, np.int32) for x in start[1:]),
    )
    used = np.full((steps, lanes), np.nan)
    lost, retries = np.zeros(lanes, int), np.zeros(lanes, int)
    for step in range(steps):
        waiting: NDArray[np.bool_] = yes
        for attempt in range(TRIES + 1):
            exponent = np.log2(state.scale.astype(np.float64))
            overflow = peak[step] + exponent > TOP
            seen = true[step] * state.scale
            seen[seen < 2.0**FLUSHED] = 0
            seen[overflow] = np.inf
            reading = Reading(overflow, seen.astype(np.float32), no, waiting)
            after = rule.advance(state, reading, np)
            again = waiting & overflow if retry else no
            if retry and isinstance(rule, Headroom):
                again = again | waiting & np.asarray(rule.recompute(state, after))
            if attempt == TRIES:
                again = no
            done = waiting & ~again
            used[step, done & ~overflow] = exponent[done & ~overflow]
            lost += done & overflow
            retries += again
            state, waiting = after, again
            if not again.any():
                break
        if step % 1000 == 999:
            told(1000)
    told(steps % 1000)
    return [
        _outcome(traces[i], used[:, i], int(lost[i]), 1000 * int(retries[i]) / steps)
        for i in range(lanes)
    ], used


def _outcome(trace: Trace, used: Series, lost: int, retries: float) -> Outcome:
    counts = np.isfinite(used) & np.isfinite(trace.amax)
    near = counts & (np.floor(TOP - trace.peak) - used <= WITHIN)
    settled = int(near.argmax()) + 1 if near.any() else len(used) + 1
    amax, peak, used = trace.amax[counts], trace.peak[counts], used[counts]
    return Outcome(
        lost,
        retries,
        settled,
        float(np.mean(TOP - peak - used)),
        float(np.mean(share_flushed(amax, used))),
    )


def mean(outcomes: list[Outcome]) -> dict[str, Any]:
    """Means over traces; `settled` is the latest of them all."""
    keys = ("lost", "retries", "unused", "flushed")
    means: dict[str, Any] = {k: float(np.mean([getattr(o, k) for o in outcomes])) for k in keys}
    return {**means, "settled": max(o.settled for o in outcomes)}

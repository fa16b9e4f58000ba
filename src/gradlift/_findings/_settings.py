"""Findings about what surrounds the scale: its factors, the schedule of the learning rate."""

from __future__ import annotations

import math
from itertools import pairwise

from .._words import power
from ..journal import Run, Step
from ..rules._rule import is_power_of_two
from ._finding import Finding, lost, numbers, per_key, times

MOVED_STEPS = 3  # fewer may be the end of an epoch, where a schedule may move as it likes
MOVED_SHARE = 0.01  # a schedule that is off by less than 1 % of its length cannot be told apart


@per_key
def lr_moved(steps: list[Step], run: Run) -> Finding | None:
    """The learning rate went on although the step was skipped."""
    skipped = [(s, after) for s, after in pairwise(steps) if lost(s)]
    moved = [
        (s, after) for s, after in skipped if s.lr == s.lr and after.lr == after.lr != s.lr
    ]  # x == x: known
    if len(moved) < MOVED_STEPS or len(moved) < MOVED_SHARE * len(steps):
        return None
    first, after = moved[0]
    return Finding(
        "warning",
        "The learning rate moves on skipped steps",
        f"On {len(moved)} of {times(len(skipped), 'skipped step')} the schedule went on, the first "
        f"time at step {first.step}, from {first.lr:.4g} to {after.lr:.4g}: "
        f"{len(moved) / len(steps):.0%} of the schedule passed without an update.",
        numbers([s for s, _ in moved]),
        (),
        "Call train_step(scheduler=...), or scheduler.step() only if scaler.result.stepped.",
        "lr-moved",
    )


@per_key
def odd_scale(steps: list[Step], run: Run) -> Finding | None:
    """A scale that is no power of two rounds every gradient twice."""
    odd = {scale for scale in {s.scale for s in steps} if not is_power_of_two(scale)}
    bad = [s for s in steps if s.scale in odd and 0 < s.scale < math.inf]
    if not bad:
        return None
    nearest = power(2.0 ** round(math.log2(bad[0].scale)))
    return Finding(
        "hint",
        "The scale is not a power of two",
        f"It was {power(bad[0].scale)} at step {bad[0].step} and odd in {len(bad)} of "
        f"{times(len(steps), 'step')}: multiplying by it and dividing again changes the last bit "
        "of about one gradient element in ten.",
        numbers(bad),
        (),
        f"Use powers of two: init_scale={nearest}, growth_factor=2, backoff_factor=0.5.",
        "odd-scale",
    )

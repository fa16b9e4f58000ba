"""Findings about settings: the factors of the scale, the learning rate's schedule."""

from __future__ import annotations

import math
from itertools import pairwise

from ...journal import Run, Step
from ...rules.base import is_power_of_two
from ..words import count, power
from .finding import Finding, numbers, per_key

MOVED_STEPS = 3  # fewer may be ends of epochs, where schedules change the rate
MOVED_SHARE = 0.01  # a schedule that is off by less than 1 % of its length is within the noise


@per_key
def lr_moved(steps: list[Step], run: Run) -> Finding | None:
    """The learning rate changed although the step was skipped."""
    skipped = [(s, after) for s, after in pairwise(steps) if s.skipped]
    moved = [
        (s, after) for s, after in skipped if s.lr == s.lr and after.lr == after.lr != s.lr
    ]  # x == x: known
    if len(moved) < MOVED_STEPS or len(moved) < MOVED_SHARE * len(steps):
        return None
    first, after = moved[0]
    return Finding(
        "warning",
        "The learning rate moves on skipped steps",
        f"On {len(moved)} of {count(len(skipped), 'skipped step')} the schedule moved, the first "
        f"time at step {first.step}, from {first.lr:.4g} to {after.lr:.4g}: "
        f"{len(moved) / len(steps):.0%} of the schedule passed without an update.",
        numbers([s for s, _ in moved]),
        (),
        "Call train_step(scheduler=...), or scheduler.step() only if scaler.result.stepped.",
        "lr-moved",
    )


@per_key
def odd_scale(steps: list[Step], run: Run) -> Finding | None:
    """A scale that is not a power of two rounds gradients."""
    odd = {scale for scale in {s.scale for s in steps} if not is_power_of_two(scale)}
    bad = [s for s in steps if s.scale in odd and 0 < s.scale < math.inf]
    if not bad:
        return None
    nearest = power(2.0 ** min(1023, round(math.log2(bad[0].scale))))
    return Finding(
        "hint",
        "The scale is not a power of two",
        f"It was {power(bad[0].scale)} at step {bad[0].step}, and no power of two in {len(bad)} of "
        f"{count(len(steps), 'step')}: multiplying by it and dividing again changes the last bit "
        "of about one gradient element in ten.",
        numbers(bad),
        (),
        f"Use powers of two: init_scale={nearest}, growth_factor=2, backoff_factor=0.5.",
        "odd-scale",
    )

"""Findings about settings: the factors of the scale, the learning rate's schedule."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from ...core import Cause
from ...journal import Run, Step
from ...rules.base import is_power_of_two
from ..words import count, power
from .finding import Finding, numbers, overflowed, per_key
from .underflow import conservative

_INTERVAL = re.compile(r"growth_interval=(\d+)")
NEVER = 10**6  # clean steps until the scale grows: longer than most runs
EAGER = 10  # clean steps: fewer cannot show that a scale fits
EAGER_LOST = 0.1  # of all steps
MOVED_STEPS = 3  # fewer may be ends of epochs, where schedules change the rate
MOVED_SHARE = 0.01  # a schedule that is off by less than 1 % of its length is within the noise


@per_key
def lr_moved(steps: list[Step], run: Run) -> Finding | None:
    """The learning rate changed although the step was skipped."""
    skipped = [(s, after) for s, after in pairwise(steps) if s.skipped]
    next_to = (pair for pair in skipped if pair[1].step - pair[0].step <= 1)  # a log has gaps
    moved = [
        (s, after) for s, after in next_to if s.lr == s.lr and after.lr == after.lr != s.lr
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
    if all(s.cause is Cause.FLOOR for s in bad):  # a minimum may be odd
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


@per_key
def growth_eager(steps: list[Step], run: Run) -> Finding | None:
    """The scale is raised after so few clean steps that a large share of steps overflows."""
    match = _INTERVAL.search(str(run.header.get("rule", "")))
    interval = int(match[1]) if match else 0
    lost = [s for s in steps if overflowed(s)]
    if not 0 < interval <= EAGER or len(lost) < EAGER_LOST * len(steps) or len(lost) < 5:
        return None
    return Finding(
        "warning",
        "The scale is raised too eagerly",
        f"growth_interval is {interval}: {len(lost)} of {count(len(steps), 'step')} overflowed, "
        "mostly just after the scale had been raised.",
        numbers(lost),
        (),
        'Use a growth_interval of 500 or more (torch\'s default is 2000), or rule="auto".',
        "growth-eager",
        "",
        "certain",
    )


def _fixed_too_low(steps: list[Step], run: Run) -> Finding | None:
    """A scale that will not grow in the time of a run, and leaves bits unused."""
    rule = str(run.header.get("rule", ""))
    match = _INTERVAL.search(rule)
    fixed = rule.startswith("static") or (match is not None and int(match[1]) >= NEVER)
    hint = conservative(run) if fixed and len({s.scale for s in steps}) == 1 else None
    if hint is None:
        return None
    return hint._replace(
        severity="warning",
        title=f"The fixed scale {power(steps[0].scale)} is too low",
        advice=f"{hint.advice} Or let the scale grow: growth_interval=2000, torch's default.",
        kind="static-misfit",
    )


@per_key
def static_misfit(steps: list[Step], run: Run) -> Finding | None:
    """A scale that is held fixed, and overflows in most steps."""
    if low := _fixed_too_low(steps, run):
        return low
    scales = {s.scale for s in steps}
    lost = [s for s in steps if overflowed(s)]
    if len(scales) != 1 or scales == {math.nan} or len(lost) < max(10, len(steps) // 2):
        return None
    (scale,) = scales
    return Finding(
        "broken",
        f"The fixed scale {power(scale)} is too high",
        f"{len(lost)} of {count(len(steps), 'step')} overflowed, and the scale never moved.",
        numbers(lost),
        (),
        "Let the scale move (GradScaler's own update()), or fix a lower one: gradlift find-scale.",
        "static-misfit",
        "",
        "certain",
    )

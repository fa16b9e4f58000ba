"""What is done with a step, and why. Pure functions: the whole policy, shared by every adapter.

Those that take `xp` are branch-free in the data, so that traced code can call them; `xp` is then
numpy, torch, jax.numpy or keras.ops, and the scalars are 0-d arrays of that library.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError
from ..namespace import namespace
from ..reading import Reading
from ..rules import Off, Rule, ScaleState

HALF_LOSS_CEILING = 2.0**15
"""A float16 loss casts the scale itself to float16 in backward, and float16 ends below 2^16."""


class Verdict(enum.Enum):
    """What becomes of a step.

    >>> print(Verdict.SKIP)
    skip
    """

    APPLY = "apply"
    SKIP = "skip"
    RETRY = "retry"
    HALT = "halt"

    def __str__(self) -> str:
        return self.value


class Cause(enum.IntEnum):
    """Why a step was not applied, or not in full; the numbers are what jitted code carries.

    >>> print(Cause.LOSS_NONFINITE, int(Cause.OVERFLOW))
    loss non-finite 1
    """

    NONE = 0
    OVERFLOW = 1
    """Finite loss, non-finite gradients: the scale was too large."""
    LOSS_NONFINITE = 2
    """The loss was inf or NaN before it was scaled: no scale can cure that."""
    UNKNOWN_NONFINITE = 3
    """Non-finite gradients, and it is not known whether the loss was finite."""
    FLOOR = 4
    """Non-finite gradients at the smallest scale the rule may use."""
    NO_GRADIENTS = 5
    """There was nothing to apply."""
    CALIBRATION = 6
    """The first gradients showed that a far larger scale fits: the batch is computed again."""
    WEIGHT_RANGE = 7
    """The step was applied, and a master left the range of its 16-bit weight, which stays at the
    format's largest finite number."""

    def __str__(self) -> str:
        return self.name.lower().replace("nonfinite", "non-finite").replace("_", " ")


@dataclass(frozen=True)
class Limits:
    """When to stop a run that only skips. By default: never.

    `max_consecutive_skips`: so many skips in a row are tolerated, the next one halts.
    `on_floor`: what a non-finite gradient at the smallest scale does: "hold" and "warn" skip (and
    warn), "raise" halts.

    >>> Limits(on_floor="explode")
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: on_floor is 'explode', expected 'hold', 'warn' or 'raise'
    """

    max_consecutive_skips: int | None = None
    on_floor: str = "hold"

    def __post_init__(self) -> None:
        if self.on_floor not in ("hold", "warn", "raise"):
            raise SettingsError(
                f"on_floor is {self.on_floor!r}, expected 'hold', 'warn' or 'raise'"
            )
        most = self.max_consecutive_skips
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise SettingsError(
                f"max_consecutive_skips is {most!r}, expected None or a whole number, 1 or more"
            )


NO_LIMITS = Limits()


def cause_of(
    reading: Reading, state: ScaleState, rule: Rule, *, loss_known: Any = True, xp: Any = None
) -> Any:
    """Why a step that showed `reading` is not applied, as a number of `Cause`; 0 if it is.

    Branch-free in the data, so that traced code can carry it. `state` is the one *before* the step.

    >>> from gradlift.rules import Backoff
    >>> rule = Backoff()
    >>> Cause(cause_of(Reading(nonfinite=True, amax=1.0), rule.init(), rule, loss_known=False))
    <Cause.UNKNOWN_NONFINITE: 3>
    """
    ns = namespace(xp)
    blamed = ns.where(loss_known, int(Cause.OVERFLOW), int(Cause.UNKNOWN_NONFINITE))
    if rule.min_scale < rule.max_scale:
        at_floor = ns.and_(state.scale <= rule.min_scale, state.left <= 1)
        blamed = ns.where(at_floor, int(Cause.FLOOR), blamed)
    cause = ns.where(reading.nonfinite, blamed, int(Cause.NONE))
    cause = ns.where(reading.loss_nonfinite, int(Cause.LOSS_NONFINITE), cause)
    return ns.where(reading.checked, cause, int(Cause.NO_GRADIENTS))


def verdict_of(cause: Cause, skips_before: int, limits: Limits = NO_LIMITS) -> Verdict:
    """What a cause leads to where nothing is retried. `skips_before` counts the steps in a row
    that were skipped before this one.

    >>> verdict_of(Cause.OVERFLOW, 2, Limits(max_consecutive_skips=2))
    <Verdict.HALT: 'halt'>
    """
    if cause is Cause.NONE or cause is Cause.WEIGHT_RANGE:
        return Verdict.APPLY
    if cause is Cause.NO_GRADIENTS:
        return Verdict.SKIP
    most = limits.max_consecutive_skips
    too_many = most is not None and skips_before + 1 > most
    if too_many or (cause is Cause.FLOOR and limits.on_floor == "raise"):
        return Verdict.HALT
    return Verdict.SKIP


def is_skip(verdict: Verdict | None, cause: Cause) -> bool:
    """Was a step skipped: was there something to apply, and it was not applied? This is the one
    meaning of the word, in every count, report and sink.

    >>> is_skip(Verdict.SKIP, Cause.OVERFLOW), is_skip(Verdict.SKIP, Cause.NO_GRADIENTS)
    (True, False)
    """
    return verdict not in (Verdict.APPLY, None) and cause is not Cause.NO_GRADIENTS


def decide(
    reading: Reading,
    state: ScaleState,
    rule: Rule,
    limits: Limits = NO_LIMITS,
    *,
    loss_known: bool = True,
    retries_left: int = 0,
) -> tuple[Verdict, Cause]:
    """What to do with a step that showed `reading`, and why. `state` is the one *before* it.

    After an overflow a retry is offered only where the rule answers with a lower scale: the same
    batch at the same scale would overflow again. A clean batch is tried again only if the rule
    wants to `recompute` it (it was the first to show how large gradients are, and a far larger
    scale fits them) and one more try is left, to come back if it does not.

    >>> from gradlift.rules import Backoff
    >>> rule = Backoff()
    >>> overflow = Reading(nonfinite=True, amax=float("inf"))
    >>> decide(overflow, rule.init(), rule)
    (<Verdict.SKIP: 'skip'>, <Cause.OVERFLOW: 1>)
    >>> decide(overflow._replace(loss_nonfinite=True), rule.init(), rule)
    (<Verdict.SKIP: 'skip'>, <Cause.LOSS_NONFINITE: 2>)
    """
    if isinstance(rule, Off):
        return Verdict.APPLY, Cause.NONE
    clean = reading.checked and not reading.nonfinite and not reading.loss_nonfinite
    if clean and not retries_left:
        return Verdict.APPLY, Cause.NONE
    cause = Cause(cause_of(reading, state, rule, loss_known=loss_known))
    if retries_left and cause is not Cause.NO_GRADIENTS:
        after = rule.advance(state, reading)
        lower, larger = worth_retrying(rule, state, after, reading, retries_left)
        if lower or larger:
            return Verdict.RETRY, Cause.CALIBRATION if larger else cause
    return verdict_of(cause, state.skips, limits), cause


# Retries


def worth_retrying(
    rule: Rule,
    before: ScaleState,
    after: ScaleState,
    reading: Reading,
    retries_left: Any,
    xp: Any = None,
) -> tuple[Any, Any]:
    """Two flags: is the batch computed again at a lower scale, or at a far larger one?

    `before` and `after` are the rule's states around the step. A larger scale is tried only if one
    more try is left after it.

    >>> from gradlift.rules import Backoff
    >>> rule = Backoff()
    >>> overflow = Reading(nonfinite=True, amax=float("inf"))
    >>> after = rule.advance(rule.init(), overflow)
    >>> worth_retrying(rule, rule.init(), after, overflow, retries_left=1)
    (True, False)
    """
    ns = namespace(xp)
    loss_finite = ns.not_(reading.loss_nonfinite)
    overflow = ns.and_(reading.nonfinite, loss_finite)
    clean = ns.and_(ns.not_(reading.nonfinite), loss_finite)
    lower = ns.and_(ns.and_(overflow, after.scale < before.scale), retries_left > 0)
    larger = ns.and_(ns.and_(clean, rule.recompute(before, after)), retries_left > 1)
    return lower, larger


def next_try(
    before: ScaleState,
    after: ScaleState,
    larger: Any,
    clean_at: Any,
    retries_left: Any,
    xp: Any = None,
) -> tuple[ScaleState, Any]:
    """The state for the next try, and the scale at which this batch was clean (0: at none yet).

    A retry is no skip. The last try goes back to a scale at which the batch was clean, if there is
    one: it must not be lost.

    >>> state = ScaleState(8.0, skips=1)
    >>> next_try(state, ScaleState(4.0, skips=2), False, 0.0, 1)[0][:3]
    (4.0, 0, 1)
    """
    ns = namespace(xp)
    clean_at = ns.where(larger, before.scale, clean_at)
    go_back = ns.and_(ns.and_(ns.not_(larger), clean_at > 0), retries_left == 1)
    scale = ns.where(go_back, clean_at, after.scale)
    return after._replace(scale=scale, skips=before.skips), clean_at


# Losses


def loss_level(flags: Sequence[Any]) -> int:
    """0 if none of a window's losses was non-finite, 2 if all were, else 1. Ranks combine by max.

    >>> loss_level([]), loss_level([True]), loss_level([False, True])
    (0, 2, 1)
    """
    return any(flags) + all(flags) if flags else 0


def loss_blamed(level: Any, nonfinite: Any) -> Any:
    """Is a loss to blame? If only some of a window's losses were non-finite, only where the
    gradients show it: the others may belong to another optimizer, or were given up.

    >>> loss_blamed(1, False), loss_blamed(1, True), loss_blamed(2, False)
    (False, True, True)
    """
    return level + nonfinite >= 2


def carried(scale: Any, half_loss: bool, xp: Any = None) -> Any:
    """The scale that a loss can carry: at most 2^15 if it is float16.

    >>> carried(2.0**16, True), carried(2.0**16, False)
    (32768.0, 65536.0)
    """
    return namespace(xp).minimum(scale, HALF_LOSS_CEILING) if half_loss else scale


# Clipping


def checked_max_norm(max_norm: Any) -> float:
    """`max_norm`, if gradients can be clipped at it.

    >>> checked_max_norm(0)
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: max_norm is 0, expected a number above 0
    """
    if isinstance(max_norm, bool) or not max_norm > 0:
        raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
    return float(max_norm)


def clip_coefficient(norm: Any, max_norm: float, xp: Any = None) -> Any:
    """min(max_norm / (norm + 1e-6), 1) as `torch.nn.utils.clip_grad_norm_` computes it, to the bit:
    in float32, and by a reciprocal.

    >>> clip_coefficient(0.5, 1.0), round(clip_coefficient(4.0, 1.0), 6)
    (1.0, 0.25)
    """
    if xp is not None:
        return namespace(xp).minimum(xp.reciprocal(norm + 1e-6) * max_norm, 1.0)
    inverse = _f32(1 / _f32(_f32(norm) + _f32(1e-6)))
    return min(_f32(inverse * _f32(max_norm)), 1.0)


def _f32(x: float) -> float:
    """Rounded to float32; inf above its range. Products and quotients of float32 numbers are
    rounded rightly this way, since a double has more than twice their digits."""
    try:
        return float(namespace(None).f32(x))
    except OverflowError:
        return math.copysign(math.inf, x)


# The scale


def moved(
    rule: Rule,
    state: ScaleState,
    reading: Reading,
    *,
    retry: bool = False,
    dropped: Any = False,
    ceiling: float = math.inf,
    xp: Any = None,
) -> ScaleState:
    """The rule's next state. A retry is no skip; nor is a step that was applied without some of
    its micro-batches (`dropped`), though their overflow moves the scale.

    >>> from gradlift.rules import Backoff
    >>> rule = Backoff()
    >>> moved(rule, rule.init(), Reading(nonfinite=True, amax=1.0), retry=True)[:3]
    (32768.0, 0, 0)
    """
    after = rule.advance(state, reading, xp)
    if retry:
        after = after._replace(skips=state.skips)
    elif dropped is not False:
        after = after._replace(skips=namespace(xp).where(dropped, 0, after.skips))
    if ceiling < math.inf:
        after = after._replace(scale=namespace(xp).minimum(after.scale, ceiling))
    return after


def sharpened(rule: Rule, sharp: Rule, state: ScaleState) -> ScaleState:
    """The state with which `sharp` takes the place of `rule`: what was learned stays; before the
    first finite reading there is nothing but the cautious rule's own start.

    >>> from gradlift.rules import resolve
    >>> cautious, sharp = resolve("auto", retries=False), resolve("auto", retries=True)
    >>> sharpened(cautious, sharp, cautious.init()._replace(scale=4.0)) == sharp.init()
    False
    >>> sharpened(cautious, sharp, cautious.init()) == sharp.init()
    True
    """
    if rule.calibrated(state):
        return state
    return sharp.init()._replace(scale=state.scale, skips=state.skips)

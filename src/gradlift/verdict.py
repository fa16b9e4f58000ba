"""What is done with a step, and why: `decide` is the whole policy, a pure function."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ._xp import namespace
from .errors import SettingsError
from .reading import Reading
from .rules import Off, Rule, ScaleState


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
    """Why a step was not applied; the numbers are what jitted code carries.

    >>> print(Cause.LOSS_NONFINITE, int(Cause.OVERFLOW))
    loss non-finite 1
    """

    NONE = 0
    OVERFLOW = 1
    """Finite loss, non-finite gradients: the scale was too large."""
    LOSS_NONFINITE = 2
    """The loss was inf or NaN before it was scaled: no scale can cure that."""
    UNKNOWN_NONFINITE = 3
    """Non-finite gradients, and nobody knows whether the loss was finite."""
    FLOOR = 4
    """Non-finite gradients at the smallest scale the rule may use."""
    NO_GRADIENTS = 5
    """There was nothing to apply."""
    CALIBRATION = 6
    """The first gradients showed that a far larger scale fits: the batch is computed again."""

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
    cause = Cause(cause_of(reading, state, rule, loss_known=loss_known))
    if cause is Cause.NO_GRADIENTS:
        return Verdict.SKIP, cause
    if cause is Cause.NONE:
        if retries_left > 1 and rule.recompute(state, rule.advance(state, reading)):
            return Verdict.RETRY, Cause.CALIBRATION
        return Verdict.APPLY, cause

    most = limits.max_consecutive_skips
    if retries_left > 0 and rule.advance(state, reading).scale < state.scale:
        return Verdict.RETRY, cause
    if cause is Cause.FLOOR and limits.on_floor == "raise":
        return Verdict.HALT, cause
    if most is not None and state.skips + 1 > most:
        return Verdict.HALT, cause
    return Verdict.SKIP, cause


_WHAT_TO_TRY = {
    Cause.OVERFLOW: "Lower the learning rate or clip the gradients; if the first steps of a run "
    "overflow, start from a lower init_scale or use the rule 'auto'.",
    Cause.UNKNOWN_NONFINITE: "Print the loss: if it is NaN the forward pass is at fault, and no "
    "scale will help; else lower the learning rate or clip the gradients.",
    Cause.LOSS_NONFINITE: "The scale is innocent: look for inf or NaN in the inputs, a log or a "
    "division in the loss, or activations that leave float16's range in the forward pass.",
    Cause.FLOOR: "The scale is as low as it may go and gradients are still not finite, so this is "
    "hardly a matter of scale: look for inf or NaN in the backward pass, lower the learning rate, "
    "clip the gradients, or keep the named layer in float32.",
}


def explain_halt(
    cause: Cause,
    state: ScaleState,
    rule: Rule,
    *,
    step: int | None = None,
    culprits: tuple[str, ...] = (),
) -> str:
    """One paragraph for a HALT: how many skips, since when, why, where, what to try.

    >>> from gradlift.rules import Backoff
    >>> state = Backoff().init()._replace(skips=3)
    >>> print(explain_halt(Cause.OVERFLOW, state, Backoff(), step=10, culprits=("head.weight",)))
    Training was halted: 4 steps in a row were skipped, since step 7. The cause of the last one: \
overflow, at scale 2^16 with the rule 'backoff'. First non-finite gradient: head.weight. Lower the \
learning rate or clip the gradients; if the first steps of a run overflow, start from a lower \
init_scale or use the rule 'auto'.
    """
    skips = int(state.skips) + 1
    said = f"{skips} steps in a row were skipped" if skips > 1 else "a step could not be applied"
    if step is not None:
        said += f", since step {step - skips + 1}" if skips > 1 else f" (step {step})"
    where = f" First non-finite gradient: {culprits[0]}." if culprits else ""
    return (
        f"Training was halted: {said}. The cause of the last one: {cause}, at scale "
        f"2^{math.log2(float(state.scale)):g} with the rule '{rule}'.{where} {_WHAT_TO_TRY[cause]}"
    )


class Culprit(str):
    """The name of a parameter whose gradient was not finite; `kind` is "inf" or "nan".

    >>> Culprit("head.weight", "nan") == "head.weight", Culprit("head.weight", "nan").described
    (True, 'head.weight (nan)')
    """

    kind: str

    def __new__(cls, name: str, kind: str = "") -> Culprit:
        culprit = super().__new__(cls, name)
        culprit.kind = kind
        return culprit

    @property
    def described(self) -> str:
        return f"{self} ({self.kind})" if self.kind else str(self)

    def __reduce__(self) -> tuple[type[Culprit], tuple[str, str]]:
        return Culprit, (str(self), self.kind)


@dataclass(frozen=True)
class StepResult:
    """What a step came to.

    >>> result = StepResult(Verdict.SKIP, Cause.OVERFLOW, scale=65536.0, culprits=("head.weight",))
    >>> result.stepped
    False
    >>> print(result)
    skip (overflow) at scale 2^16, first non-finite: head.weight
    """

    verdict: Verdict
    cause: Cause
    scale: float
    """The scale that this step's gradients carried."""
    grad_norm: float = math.nan
    """Norm of the true (unscaled) gradients before clipping; NaN where it was not taken."""
    culprits: tuple[str, ...] = ()
    """Parameters with non-finite gradients, the first to go wrong in front."""
    retries: int = 0
    """How often this batch was recomputed at another scale."""
    micro_batch: int | None = None
    """Index in the window of the first of several micro-batches that went wrong."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing, such as "loss computed in float16"."""

    @property
    def stepped(self) -> bool:
        """Did the weights move? Schedules, EMA and counters should follow this."""
        return self.verdict is Verdict.APPLY

    def __str__(self) -> str:
        said = str(self.verdict)
        if self.cause is not Cause.NONE:
            said += f" ({self.cause})"
        said += f" at scale 2^{math.log2(self.scale):g}"
        if not math.isnan(self.grad_norm):
            said += f", norm {self.grad_norm:.4g}"
        if self.retries:
            said += f", {self.retries} retries"
        if self.culprits:
            first = self.culprits[0]
            said += f", first non-finite: {getattr(first, 'described', first)}"
        if self.micro_batch is not None:
            said += f", micro-batch {self.micro_batch}"
        return "; ".join([said, *self.notes])


class LaterResult(StepResult):
    """A result whose values still lie on a device: `read()` fetches them when first asked for.

    >>> result = LaterResult(lambda: StepResult(Verdict.APPLY, Cause.NONE, 8.0))
    >>> result.stepped
    True
    """

    def __init__(self, read: Callable[[], StepResult]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if name in _RESULT_FIELDS:
            values = object.__getattribute__(self, "__dict__")
            read = values.pop("_read", None)
            if read is not None:
                values.update(vars(read()))
        return object.__getattribute__(self, name)


_RESULT_FIELDS = frozenset(f.name for f in fields(StepResult))

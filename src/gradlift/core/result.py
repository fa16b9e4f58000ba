"""A finished step: what it came to, and what happens then.

Finished -> conclude -> the listener records it, the floor's warning, a halt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import TrainingHalted, warn
from ..reading import Reading
from ..rules import Rule, ScaleState
from ..text import power, visible
from .decision import NO_LIMITS, Cause, Limits, Verdict, is_skip, verdict_of


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


class Note(str):
    """Something worth knowing about a step: a sentence, and a `code` by which findings know it.

    >>> HALF_LOSS.code
    'half-loss'
    """

    code: str
    once: bool
    """It holds for the whole run: recorded at the first step that has it."""

    def __new__(cls, code: str, text: str, once: bool = False) -> Note:
        note = super().__new__(cls, text)
        note.code, note.once = code, once
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str, bool]]:
        return Note, (self.code, str(self), self.once)


WEIGHT_RANGE = "weight-range"
WEIGHTS_NONFINITE = "weights-nonfinite"


def weights_nonfinite(weights: Sequence[Culprit]) -> Note:
    """After a bad step: weights that are not finite themselves, so the loss follows from them.

    >>> print(weights_nonfinite([Culprit("head.weight", "nan")]))
    the weight head.weight holds nan itself, so no scale can help: load a checkpoint whose weights \
are finite, or look at their initialisation
    """
    more = f" and {len(weights) - 1} more hold" if len(weights) > 1 else " holds"
    return Note(
        WEIGHTS_NONFINITE,
        f"the weight {weights[0]}{more} {weights[0].kind} itself, so no scale can help: load a "
        "checkpoint whose weights are finite, or look at their initialisation",
        once=True,
    )


HALF_LOSS = Note("half-loss", "loss computed in float16: its scale is capped at 2^15", once=True)


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
    """Parameters with non-finite gradients, the first to go wrong in front; for WEIGHT_RANGE those
    whose 16-bit weights could not follow their masters."""
    retries: int = 0
    """How often this batch was recomputed at another scale."""
    micro_batch: int | None = None
    """Index in the window of the first of several micro-batches whose loss was not finite, or that
    was dropped."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing, such as "loss computed in float16"."""

    @property
    def stepped(self) -> bool:
        """Did the weights move? Schedules, EMA and counters should follow this."""
        return self.verdict is Verdict.APPLY

    @property
    def skipped(self) -> bool:
        """Was there something to apply, and it was not applied? What every count of skips counts.

        >>> StepResult(Verdict.SKIP, Cause.NO_GRADIENTS, 8.0).skipped
        False
        """
        return is_skip(self.verdict, self.cause)

    def __str__(self) -> str:
        said = str(self.verdict)
        if self.cause is not Cause.NONE:
            said += f" ({self.cause})"
        said += f" at scale {power(self.scale)}"
        if not math.isnan(self.grad_norm):
            said += f", norm {self.grad_norm:.4g}"
        if self.retries:
            said += f", {self.retries} retries"
        if self.culprits:
            first = self.culprits[0]
            what = "out of range" if self.cause is Cause.WEIGHT_RANGE else "first non-finite"
            said += f", {what}: {getattr(first, 'described', first)}"
        if self.micro_batch is not None:
            said += f", micro-batch {self.micro_batch}"
        return visible("; ".join([said, *self.notes]))


class Finished(NamedTuple):
    """One finished step in plain numbers: all there is to say and to record of it.

    An adapter whose numbers lie on a device reads them in one transfer, then makes one of these.
    """

    step: int
    before: ScaleState
    """The state before the step; its scale is the one that the gradients carried."""
    next_scale: float
    reading: Reading
    cause: Cause
    loss: float = math.nan
    culprits: tuple[Culprit, ...] = ()
    retries: int = 0
    micro_batch: int | None = None
    notes: tuple[Note, ...] = ()
    lr: float = math.nan
    key: str = ""
    """Which of several losses, each with a scale of its own."""
    seconds: float = math.nan
    """How long it took, where several steps are read at once."""


def weights_held(finished: Finished, names: Sequence[str], largest: float) -> Finished:
    """A step that was applied while the 16-bit weights of some parameters stay at `largest` (NaN:
    not known any more).

    >>> done = Finished(0, ScaleState(8.0), 8.0, Reading(False, 1.0), Cause.NONE)
    >>> print(result_of(weights_held(done, ["head.weight"], 65504.0), Verdict.APPLY))
    apply (weight range) at scale 2^3, out of range: head.weight; the float32 master of \
head.weight left the range of its 16-bit weight, which stays at 65504
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    where = "its end" if math.isnan(largest) else f"{largest:.6g}"
    note = Note(
        WEIGHT_RANGE,
        f"the float32 master of {names[0]}{more} left the range of its 16-bit weight, which stays "
        f"at {where}",
        once=True,
    )
    return finished._replace(
        cause=Cause.WEIGHT_RANGE,
        culprits=tuple(map(Culprit, names)),
        notes=(*finished.notes, note),
    )


class Listener(Protocol):
    """Receives finished steps: `gradlift.journal.Channel` is one."""

    def step(self, finished: Finished, result: StepResult) -> None: ...
    def retry(self, finished: Finished, result: StepResult) -> None: ...


def result_of(finished: Finished, verdict: Verdict) -> StepResult:
    """What the caller gets.

    >>> done = Finished(0, ScaleState(8.0), 8.0, Reading(False, 1.0, norm=0.5), Cause.NONE)
    >>> print(result_of(done, Verdict.APPLY))
    apply at scale 2^3, norm 0.5
    """
    reading = finished.reading
    return StepResult(
        verdict,
        finished.cause,
        float(finished.before.scale),
        reading.norm if reading.checked and not reading.nonfinite else math.nan,
        finished.culprits,
        finished.retries,
        finished.micro_batch,
        finished.notes,
    )


def conclude(
    finished: Finished, rule: Rule, limits: Limits = NO_LIMITS, listener: Listener | None = None
) -> StepResult:
    """Ends a step: the listener first, then the warning at the floor, last the halt.

    >>> done = Finished(0, ScaleState(8.0), 4.0, Reading(True, 1.0), Cause.OVERFLOW)
    >>> from gradlift.rules import Backoff
    >>> print(conclude(done, Backoff()))
    skip (overflow) at scale 2^3
    """
    verdict = Verdict.APPLY
    if finished.cause is not Cause.NONE:
        verdict = verdict_of(finished.cause, int(finished.before.skips), limits)
    result = result_of(finished, verdict)
    if listener is not None:
        listener.step(finished, result)
    if finished.cause is Cause.FLOOR and limits.on_floor == "warn":
        warn(floor_warning(result))
    if verdict is Verdict.HALT:
        raise TrainingHalted(
            explain_halt(
                finished.cause,
                finished.before,
                rule,
                step=finished.step,
                culprits=finished.culprits,
                notes=finished.notes,
            )
        )
    return result


def floor_warning(result: StepResult) -> str:
    """
    >>> floor_warning(StepResult(Verdict.SKIP, Cause.FLOOR, 1.0))
    'non-finite gradients at the smallest scale, 2^0: the step was skipped and the scale held'
    """
    where = f". First non-finite gradient: {result.culprits[0]}" if result.culprits else ""
    return (
        f"non-finite gradients at the smallest scale, {power(result.scale)}: the step was "
        f"skipped and the scale held{where}"
    )


_WHAT_TO_TRY = {
    Cause.OVERFLOW: "Lower the learning rate or clip the gradients; if the first steps of a run "
    "overflow, start from a lower init_scale or use the rule 'auto'.",
    Cause.UNKNOWN_NONFINITE: "Print the loss: if it is NaN the forward pass is at fault, and no "
    "scale will help; else lower the learning rate or clip the gradients.",
    Cause.LOSS_NONFINITE: "The loss was not finite before it was scaled, so the scale was kept: "
    "look for inf or NaN in the inputs, a log or a division in the loss, or activations that leave "
    "float16's range in the forward pass.",
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
    notes: tuple[Note, ...] = (),
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
    known = next((f"{n[0].upper()}{n[1:]}." for n in notes if n.code == WEIGHTS_NONFINITE), "")
    advice = known or _WHAT_TO_TRY[cause]
    return (
        f"Training was halted: {said}. The cause of the last one: {cause}, at scale "
        f"{power(float(state.scale))} with the rule '{rule}'.{where} {advice}"
    )

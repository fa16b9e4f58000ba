"""`LossScale`: one scale and the path of its steps, for adapters that have numbers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..reading import Reading
from ..rules import Rule, ScaleState, parse, resolve
from . import state as saved_state
from .decision import NO_LIMITS, Cause, Limits, Verdict, decide, moved, next_try, sharpened
from .result import (
    Culprit,
    Finished,
    Listener,
    Note,
    StepResult,
    conclude,
    result_of,
    weights_held,
)


class Decision(NamedTuple):
    """What is to be done with a step, before anything was done."""

    reading: Reading
    verdict: Verdict
    cause: Cause
    retries_left: int = 0


class LossScale:
    """A rule, its state and its limits. It decides steps and finishes them, one after the other.

        decision = scale.decide(reading)            before the weights move
        scale.finish(decision, loss=loss)           after: moves the scale, concludes the step

    "auto" is cautious until `sharpen()`, which an adapter calls where batches are retried; with
    `retries=False` they never are, and it stays cautious.

    >>> scale = LossScale("dynamic:init_scale=8")
    >>> decision = scale.decide(Reading(nonfinite=True, amax=1.0))
    >>> decision.verdict, decision.cause
    (<Verdict.SKIP: 'skip'>, <Cause.OVERFLOW: 1>)
    >>> print(scale.finish(decision), scale.state.scale)
    skip (overflow) at scale 2^3 4.0
    """

    def __init__(
        self,
        rule: Rule | str | float,
        limits: Limits = NO_LIMITS,
        listener: Listener | None = None,
        *,
        retries: bool = True,
    ) -> None:
        self.rule = resolve(rule, retries=False)
        self._sharp, self._can_retry = parse(rule), retries
        self.limits, self.listener = limits, listener
        self.state = self.rule.init()
        self.ceiling = math.inf
        """The largest scale that the loss can carry."""
        self.steps = self.skipped_steps = 0
        self.result: StepResult | None = None
        self._begin()

    def _begin(self) -> None:
        """A new batch: nothing was tried yet."""
        self._retries, self._clean_at = 0, 0.0

    def cap(self, ceiling: float) -> None:
        """The loss can carry no more than `ceiling` from now on."""
        self.ceiling = ceiling
        self.state = self.state._replace(scale=min(self.state.scale, ceiling))

    def decide(
        self, reading: Reading, *, loss_known: bool = True, retries_left: int = 0
    ) -> Decision:
        """What to do with a step that showed `reading`; nothing changes."""
        verdict, cause = decide(
            reading,
            self.state,
            self.rule,
            self.limits,
            loss_known=loss_known,
            retries_left=retries_left,
        )
        return Decision(reading, verdict, cause, retries_left)

    def retry(self, decision: Decision, **facts: Any) -> None:
        """Moves the scale for another try of the same batch. `facts` are those of `finish`."""
        before, larger = self.state, decision.cause is Cause.CALIBRATION
        after = moved(self.rule, before, decision.reading, ceiling=self.ceiling)
        self.state, self._clean_at = next_try(
            before, after, larger, self._clean_at, decision.retries_left
        )
        if self.listener is not None:
            finished = self._finished(before, decision, **facts)
            self.listener.retry(finished, result_of(finished, Verdict.RETRY))
        self._retries += 1

    def finish(
        self,
        decision: Decision,
        *,
        held: Sequence[str] = (),
        largest: float = math.nan,
        **facts: Any,
    ) -> StepResult:
        """Moves the scale and concludes the step: recorded, counted, and halted if a limit says so.

        `facts` are what else is known of it: `loss`, `culprits`, `micro_batch`, `notes`, `lr`.
        `held` are parameters whose 16-bit weights stay at `largest`.
        """
        before = self.state
        self.state = moved(self.rule, before, decision.reading, ceiling=self.ceiling)
        finished = self._finished(before, decision, **facts)
        if held:
            finished = weights_held(finished, held, largest)
        self.steps += 1
        self._begin()
        self.result = result_of(finished, decision.verdict)
        self.skipped_steps += self.result.skipped
        return conclude(finished, self.rule, self.limits, self.listener)

    def _finished(
        self,
        before: Any,
        decision: Decision,
        *,
        loss: float = math.nan,
        culprits: tuple[Culprit, ...] = (),
        micro_batch: int | None = None,
        notes: tuple[Note, ...] = (),
        lr: float = math.nan,
    ) -> Finished:
        return Finished(
            self.steps,
            before,
            float(self.state.scale),
            decision.reading,
            decision.cause,
            loss,
            culprits,
            self._retries,
            micro_batch,
            notes,
            lr,
        )

    def sharpen(self) -> None:
        """Batches are retried from now on, so "auto" keeps less headroom."""
        if self.rule != self._sharp:
            self.state = sharpened(self.rule, self._sharp, self.state)
            self.rule = self._sharp

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, JSON-able: the layout that all adapters share."""
        return saved_state.save(
            self.rule,
            self.state,
            steps=self.steps,
            skipped=self.skipped_steps,
            sharp=self.rule == self._sharp,
        )

    def load_state_dict(self, data: Any) -> None:
        """Resumes from any adapter's `state_dict()`, or torch's; what is damaged is refused and
        changes nothing.

        >>> scale = LossScale("dynamic")
        >>> scale.load_state_dict(LossScale("dynamic:init_scale=8").state_dict())
        >>> scale.state.scale
        8.0
        """
        loaded = saved_state.load(self.rule, data)
        if loaded.sharp and self._can_retry:
            self.sharpen()
        self.state, self.steps, self.skipped_steps = loaded.state, loaded.steps, loaded.skipped
        self._begin()


class LossScaleOwner:
    """What the adapters that keep a `LossScale` show of it.

    >>> class Scaler(LossScaleOwner):
    ...     def __init__(self, rule):
    ...         self._loss_scale = LossScale(rule)
    >>> Scaler("static:8").get_scale(), Scaler("static:8").steps
    (8.0, 0)
    """

    _loss_scale: LossScale

    @property
    def rule(self) -> Rule:
        """The rule that moves the scale."""
        return self._loss_scale.rule

    @property
    def limits(self) -> Limits:
        """When a run that only skips is stopped."""
        return self._loss_scale.limits

    @property
    def state(self) -> ScaleState:
        """The rule's state, of which the scale is a part."""
        return self._loss_scale.state

    @property
    def result(self) -> StepResult | None:
        """What the last step came to; None before the first."""
        return self._loss_scale.result

    @property
    def steps(self) -> int:
        """Steps so far, applied or not."""
        return self._loss_scale.steps

    @property
    def skipped_steps(self) -> int:
        """Steps that had something to apply and were not applied."""
        return self._loss_scale.skipped_steps

    def get_scale(self) -> float:
        """The scale of the next loss."""
        return float(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, JSON-able: the layout that all adapters share."""
        return self._loss_scale.state_dict()

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()` of any adapter, or of torch's scaler; refuses what is damaged
        and then changes nothing."""
        self._loss_scale.load_state_dict(data)

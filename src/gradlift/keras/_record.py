"""What the optimizer keeps beside Keras' two variables, and how it is read.

    dynamic_scale   the scale                                 Keras' own
    step_counter    clean steps since the last change         Keras' own
    history         int32: the rest of a rule's state, then one count a cause
    ring            float32: what the last steps came to, one row a step

A ring, because nobody can look at every step: a compiled loop runs many between two callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..journal import Step
from ..rules import ScaleState
from ..verdict import Cause, Culprit, StepResult, Verdict

ROWS = 64
_MEMORY = len(ScaleState._fields) - 2  # what history holds of a state: all but scale and clean
HISTORY = _MEMORY + len(Cause)


class Row(NamedTuple):
    """One step in float32. `culprit` is a variable's index plus one, negative if it held NaN."""

    scale: Any
    next_scale: Any
    amax: Any
    norm: Any
    loss: Any
    cause: Any
    culprit: Any
    skips: Any
    """Steps not applied in a row, with this one."""


class Seen(NamedTuple):
    """What one look at gradients showed."""

    nonfinite: Any
    amax: Any
    """Largest |g|, as scaled."""
    norm: Any
    """Of the true gradients."""
    culprit: Any

    def but(self, now: Seen, where: Any) -> Seen:
        """Seen before the user clipped; `now` what is left, which may be bad as well."""
        bad = where(self.nonfinite, self.culprit, now.culprit)
        return Seen(self.nonfinite | now.nonfinite, self.amax, self.norm, bad)


class Values(NamedTuple):
    """The four variables' values."""

    scale: Any
    clean: Any
    history: Any
    ring: Any


def state_of(values: Values) -> ScaleState:
    """The rule's state, from arrays of any kind."""
    memory = (values.history[i] for i in range(_MEMORY))
    return ScaleState(values.scale, values.clean, *memory)


def memory_of(state: ScaleState) -> tuple[Any, ...]:
    """What goes in front of `history`."""
    return tuple(state[2:])


def counts_of(history: Any) -> Any:
    """How often each cause was met; the first is none, an applied step."""
    return history[_MEMORY:]


class Record:
    """The four variables as they were read once, in NumPy and plain numbers.

    >>> from gradlift.rules import Static
    >>> record = Record.fresh(Static(8).init())
    >>> record.steps, record.counts[Cause.OVERFLOW], record.result([])
    (0, 0, None)
    """

    def __init__(self, values: Values) -> None:
        scale, clean, history, ring = (np.asarray(v) for v in values)
        self._ring = ring
        known = Values(float(scale), int(clean), [int(x) for x in history], None)
        self.state = state_of(known)
        self.counts = dict(zip(Cause, counts_of(known.history)))
        self.steps = sum(self.counts.values())

    @classmethod
    def fresh(cls, state: ScaleState) -> Record:
        history = [*memory_of(state), *[0] * len(Cause)]
        return cls(Values(state.scale, state.clean, history, np.zeros((ROWS, len(Row._fields)))))

    @property
    def skipped(self) -> int:
        """Steps that were not applied though they had gradients."""
        return self.steps - self.counts[Cause.NONE] - self.counts[Cause.NO_GRADIENTS]

    def rows(self, since: int) -> list[tuple[int, Row]]:
        """The steps from number `since` on, as far as the ring still holds them."""
        first = max(since, self.steps - ROWS, 0)
        return [(n, Row(*map(float, self._ring[n % ROWS]))) for n in range(first, self.steps)]

    def result(self, names: Sequence[str]) -> StepResult | None:
        """What the last step came to; None before the first."""
        last = self.rows(self.steps - 1)
        return told(last[0][1], names) if last else None


def told(row: Row, names: Sequence[str]) -> StepResult:
    """A row as a result."""
    cause = Cause(int(row.cause))
    verdict = Verdict.APPLY if cause is Cause.NONE else Verdict.SKIP
    return StepResult(verdict, cause, row.scale, row.norm, culprits_of(row, names))


def culprits_of(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    index = int(abs(row.culprit)) - 1
    if not 0 <= index < len(names):
        return ()
    return (Culprit(names[index], "nan" if row.culprit < 0 else "inf"),)


def line(step: int, row: Row, names: Sequence[str], lr: float, seconds: float) -> Step:
    """A row as a line of the journal."""
    result = told(row, names)
    blameless = (Cause.NONE, Cause.NO_GRADIENTS, Cause.LOSS_NONFINITE)
    return Step(
        step,
        row.scale,
        row.next_scale,
        amax=row.amax if math.isfinite(row.amax) else math.nan,
        nonfinite=result.cause not in blameless,
        loss=row.loss,
        norm=row.norm,
        lr=lr,
        verdict=result.verdict,
        cause=result.cause,
        culprits=result.culprits,
        seconds=seconds,
    )

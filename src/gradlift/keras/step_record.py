"""What the optimizer keeps beside Keras' two variables, and how it is read.

    dynamic_scale   the scale                                 Keras' own
    step_counter    clean steps since the last change         Keras' own
    history         int32: the rest of a rule's state, then one count a cause
    ring            float32: what the last steps came to, one row a step

A ring, because a compiled loop runs many steps between two callbacks. Its rows are concluded later:

    row -> Finished -> conclude -> journal, warning, halt
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import (
    HALF_LOSS,
    Cause,
    Culprit,
    Finished,
    Limits,
    Note,
    StepResult,
    conclude,
    result_of,
    verdict_of,
)
from ..errors import TrainingHalted
from ..journal import Channel
from ..reading import Reading
from ..rules import Rule, ScaleState

ROWS = 64
_MEMORY = len(ScaleState._fields) - 2  # what history holds of a state: all but scale and clean
HISTORY = _MEMORY + len(Cause)


class StepRow(NamedTuple):
    """One step in float32: what a `Finished` is made of."""

    scale: Any
    """The scale that the gradients carried; 0 where the ring has no step."""
    next_scale: Any
    amax: Any
    norm: Any
    loss: Any
    cause: Any
    nonfinite: Any
    culprit: Any
    """A variable's index plus one, negative if its gradient held NaN; 0: none."""
    skips_before: Any
    """Steps skipped in a row before this one."""
    half_loss: Any
    """The loss was float16."""
    bad_loss: Any
    """Of several losses the first that was not finite: its index plus one; 0: none."""


class RowReading(NamedTuple):
    """What gradients showed."""

    nonfinite: Any
    amax: Any
    """Largest |g|, as scaled."""
    norm: Any
    """Of the true gradients."""
    culprit: Any

    def after_clipping(self, now: RowReading, where: Any) -> RowReading:
        """This one, taken before the user clipped, and what is not finite `now`."""
        culprit = where(self.nonfinite, self.culprit, now.culprit)
        return RowReading(self.nonfinite | now.nonfinite, self.amax, self.norm, culprit)


NO_GRADIENTS = Reading(nonfinite=False, amax=0.0, checked=False, norm=0.0)


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
    """How many steps ended for each cause; the first is none, an applied step."""
    return history[_MEMORY:]


class Record:
    """The four variables as they were read once, in NumPy and plain numbers.

    >>> from gradlift.rules import Static
    >>> record = Record.fresh(Static(8).init())
    >>> record.steps, record.counts[Cause.OVERFLOW], record.rows(0)
    (0, 0, [])
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
        ring = np.zeros((ROWS, len(StepRow._fields)))
        return cls(Values(state.scale, state.clean, history, ring))

    @property
    def skipped(self) -> int:
        """Steps that had something to apply and were not applied."""
        return self.steps - self.counts[Cause.NONE] - self.counts[Cause.NO_GRADIENTS]

    def rows(self, since: int) -> list[tuple[int, StepRow]]:
        """The steps from number `since` on, as far as the ring still holds them."""
        first = max(since, self.steps - ROWS, 0)
        rows = [(n, StepRow(*map(float, self._ring[n % ROWS]))) for n in range(first, self.steps)]
        return [(n, row) for n, row in rows if row.scale > 0]

    def result(self, names: Sequence[str], limits: Limits) -> StepResult | None:
        """What the last step came to; None before the first."""
        for step, row in self.rows(self.steps - 1):
            last = finished(step, row, names)
            return result_of(last, verdict_of(last.cause, last.before.skips, limits))
        return None


def finished(
    step: int,
    row: StepRow,
    names: Sequence[str],
    lr: float = math.nan,
    seconds: float = math.nan,
) -> Finished:
    """A row as the core knows a finished step."""
    cause = Cause(int(row.cause))
    reading = Reading(
        bool(row.nonfinite),
        row.amax,
        loss_nonfinite=cause is Cause.LOSS_NONFINITE,
        checked=cause is not Cause.NO_GRADIENTS,
        norm=row.norm,
    )
    return Finished(
        step,
        ScaleState(row.scale, skips=int(row.skips_before)),
        row.next_scale,
        reading,
        cause,
        row.loss,
        _culprits(row, names),
        micro_batch=int(row.bad_loss) - 1 if reading.loss_nonfinite and row.bad_loss else None,
        notes=(HALF_LOSS,) if row.half_loss else (),
        lr=lr,
        seconds=seconds,
    )


def _culprits(row: StepRow, names: Sequence[str]) -> tuple[Culprit, ...]:
    index = int(abs(row.culprit)) - 1
    if not 0 <= index < len(names):
        return ()
    return (Culprit(names[index], "nan" if row.culprit < 0 else "inf"),)


class Conclusions:
    """Concludes each step of the ring once: it is recorded, warned about, halted."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps concluded so far."""
        self.loggers: list[Any] = []
        """Each `ScaleLogger` of the `fit` that runs, with its channels."""
        self.run_channel: Channel | None = None
        """The channel to a run that is recorded around `fit`."""
        self._since = time.perf_counter()

    @property
    def channels(self) -> list[Channel]:
        """Where steps are recorded; that of a run around `fit` is shared by all loggers."""
        return list(dict.fromkeys(c for logger in self.loggers for c in logger.channels))

    def begin(self, steps: int) -> None:
        """Steps before number `steps` are another run's."""
        self.steps, self._since = steps, time.perf_counter()

    def take(
        self, record: Record, rule: Rule, limits: Limits, names: Sequence[str], lr: float
    ) -> None:
        """Concludes all steps since the last call; the first halt is raised at the end."""
        listeners = _Listeners(self.channels)
        if record.steps < self.steps:
            text = f"back at step {record.steps}: an older state was loaded"
            listeners.note(self.steps, Note("rewound", text))
            self.steps = record.steps
        first, self.steps = self.steps, record.steps
        rows = record.rows(first)
        if not rows:
            return
        if rows[0][0] > first:
            missing = f"{rows[0][0] - first} steps ran unseen: more than {ROWS} between two looks"
            listeners.note(first, Note("unseen", missing))
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / (record.steps - first), now
        halted: TrainingHalted | None = None
        for step, row in rows:
            try:
                conclude(finished(step, row, names, lr, seconds), rule, limits, listeners)
            except TrainingHalted as error:
                halted = halted or error
        if halted is not None:
            raise halted


class _Listeners(list[Channel]):
    """Several channels as one of the core's listeners."""

    def step(self, finished: Finished, result: StepResult) -> None:
        for channel in self:
            channel.step(finished, result)

    def retry(self, finished: Finished, result: StepResult) -> None:
        for channel in self:
            channel.retry(finished, result)

    def note(self, step: int, note: Note) -> None:
        for channel in self:
            channel.note(step, note)

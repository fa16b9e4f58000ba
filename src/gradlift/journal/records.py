"""A run as plain data: steps, samples, probes, events; skipped, peak and headroom of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core import Cause, Verdict, is_skip
from ..formats import FP16, Format
from .validation import count, text
from .validation import detail as checked

NAN = math.nan


class Step(NamedTuple):
    """One optimizer step, applied or not.

    >>> Step(3, scale=8.0, next_scale=8.0, amax=2.0).verdict
    <Verdict.APPLY: 'apply'>
    """

    step: int
    scale: float
    """The scale this step's gradients carried."""
    next_scale: float
    amax: float = NAN
    """Largest finite |gradient| as scaled; NaN where it was not measured."""
    nonfinite: bool = False
    loss: float = NAN
    norm: float = NAN
    lr: float = NAN
    verdict: Verdict | None = Verdict.APPLY
    """None only in a replay: the recording does not show the outcome."""
    cause: Cause = Cause.NONE
    culprits: tuple[str, ...] = ()
    retries: int = 0
    seconds: float = NAN
    probe_amax: float = NAN
    key: str = ""
    """Which of several losses, each with a scale of its own."""

    @property
    def skipped(self) -> bool:
        """Was there something to apply, and it was not applied?

        >>> Step(0, 8.0, 8.0, verdict=Verdict.SKIP, cause=Cause.NO_GRADIENTS).skipped
        False
        """
        return is_skip(self.verdict, self.cause)

    @property
    def peak(self) -> float:
        """The largest |gradient| seen anywhere, as scaled: at the parameters or between modules.
        NaN where the step was not finite or amax was not measured.

        >>> Step(0, 8.0, 8.0, amax=2.0, probe_amax=4.0).peak
        4.0
        """
        if self.nonfinite or not self.amax < math.inf:
            return NAN
        return self.probe_amax if self.amax < self.probe_amax < math.inf else self.amax

    def headroom(self, format: Format = FP16) -> float:
        """Bits between the peak and the format's largest number; NaN where there is no peak.

        >>> Step(0, 8.0, 8.0, amax=32752.0).headroom()
        1.0
        """
        return format.headroom(self.peak)


class Sample(NamedTuple):
    """Statistics of each parameter's gradient at one step."""

    step: int
    parameters: dict[str, dict[str, Any]]


class Probe(NamedTuple):
    """Statistics of the gradients inside the network, by module, at one step."""

    step: int
    modules: dict[str, dict[str, Any]]


class Call(NamedTuple):
    """One call of a script that has to do with a step.

    >>> Call("clip_grad_norm_", "train.py:31", "AdamW", "max_norm=1").place
    'train.py:31'
    """

    name: str
    place: str = ""
    """File and line of the script."""
    who: str = ""
    """Which optimizer or schedule."""
    fact: str = ""
    times: int = 1
    """In a row, such as those of micro-batches."""


class Calls(NamedTuple):
    """The calls of one window in their order, from its first step on.

    >>> [call.name for call in Calls(0, (Call("backward"), Call("step"))).order]
    ['backward', 'step']
    """

    step: int
    order: tuple[Call, ...]
    times: int = 1
    """How many windows had this order. The last line of an order counts."""


class Event(NamedTuple):
    """An event of a run: a skip, a retry, a halt, a resume, a note.

    >>> Event(7, "skip", {"cause": "OVERFLOW"}).what
    'skip'
    """

    step: int | None
    what: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A recorded (or replayed) run.

    >>> Run(steps=[Step(0, 8.0, 8.0), Step(1, 8.0, 4.0, verdict=Verdict.SKIP)]).skipped
    1
    """

    header: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    forwards: list[Probe] = field(default_factory=list)
    """Statistics of what modules returned in the forward pass."""
    weights: list[Sample] = field(default_factory=list)
    """Statistics of each parameter's weights and of their last update."""
    calls: list[Calls] = field(default_factory=list)
    path: Path | None = None

    @property
    def skipped(self) -> int:
        """Steps that had something to apply and were not applied."""
        return sum(s.skipped for s in self.steps)

    @property
    def by_key(self) -> dict[str, list[Step]]:
        """The steps of each loss that has a scale of its own, in order.

        >>> list(Run(steps=[Step(0, 8.0, 8.0, key="g"), Step(0, 4.0, 4.0, key="d")]).by_key)
        ['g', 'd']
        """
        found: dict[str, list[Step]] = {}
        for s in self.steps:
            found.setdefault(s.key, []).append(s)
        return found

    @property
    def undecided(self) -> int:
        """Steps of a replay whose outcome the recording does not show."""
        return sum(s.verdict is None for s in self.steps)


def event_of(step: Any, what: Any, detail: Any) -> Event:
    """An event that was saved in a scaler's state, or ValueError.

    >>> event_of(7, "skip", {"cause": "OVERFLOW"}).what
    'skip'
    """
    return Event(None if step is None else count(step), text(what), checked(text(what), detail))

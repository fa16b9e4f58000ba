"""What is told of a finished window: events, the journal's line, a warning at the floor."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import TrainingHalted
from ..journal import Event, Journal, Step
from ..rules import Rule, ScaleState
from ..verdict import Cause, Limits, StepResult, Verdict, explain_halt
from ._inspect import dense
from ._names import name_apart, name_of
from ._probe import samples
from ._statistics import statistics
from ._track import HALF_LOSS, Facts, Track
from ._window import Window

_LAST_EVENTS = 64


class Told(NamedTuple):
    """One finished window; on a device, results and facts have not been read yet."""

    key: str | None
    step: int
    results: list[StepResult]
    facts: Callable[[], Facts]
    lr: float
    late: bool


class Report:
    """Keeps the last events, writes the journal, calls back; remembers what is due later."""

    def __init__(
        self,
        rule: Rule,
        limits: Limits,
        journal: Journal | None,
        names: dict[int, str],
        on_event: Callable[[Event], None] | None,
        sample_every: int | None,
    ) -> None:
        self.rule, self.limits, self.journal = rule, limits, journal
        self.names, self.on_event, self.sample_every = names, on_event, sample_every
        self.events: deque[Event] = deque(maxlen=_LAST_EVENTS)
        self.due: list[Told] = []
        self._described = self._half_told = False
        self._named: set[int] = set()  # optimizers
        self._taken: dict[str, int] = {}  # name -> id of the parameter that has it
        self._since = time.perf_counter()

    @property
    def wanted(self) -> bool:
        """Does anybody listen, so that a device must send its values over?"""
        return bool(self.journal or self.on_event or self.limits != Limits())

    def begin(self, track: Track, window: Window) -> None:
        """Before a step, or before its gradients lose their scale: the run is described once, its
        gradients every `sample_every` steps."""
        if not self.journal or not window.grads:
            return
        if id(window.optimizer) not in self._named:
            self._named.add(id(window.optimizer))
            name_apart(window.params, self.names, self._taken)
        if not self._described:
            self._described = True
            self.journal.describe(
                rule=str(self.rule),
                framework="torch",
                formats=["fp16"],
                parameters={name_of(p, self.names): p.numel() for p in window.params},
            )
        if self.sample_every and track.steps % self.sample_every == 0 and not window.sampled:
            window.sampled = True
            shares = statistics(window.params, [dense(g) for g in window.held], self.names)
            self.journal.sample(track.steps, shares)

    def inside(self, track: Track) -> None:
        """What watchers saw in the network, before the window is cleared."""
        if self.journal and (seen := samples(track.params())):
            self.journal.probe(track.steps, seen)

    def later(self, told: Told) -> None:
        """What happened on a device is told one step later, when it has long arrived."""
        due, self.due = self.due, [told]
        for each in due:
            self.now(each)

    def flush(self) -> None:
        due, self.due = self.due, []
        for each in due:
            self.now(each)

    def now(self, told: Told) -> None:
        """Tells of one window; raises if one of its results is a halt that came late."""
        bad = [r for r in told.results if not r.stepped and r.cause is not Cause.NO_GRADIENTS]
        shown = bad[0] if bad else told.results[-1]
        if bad:
            self.event(told.key, told.step, shown, told.facts().next_scale)
            self._warn_at_floor(shown)
        if HALF_LOSS in shown.notes and self.journal and not self._half_told:
            self._half_told = True
            self.journal.event("note", told.step, text=HALF_LOSS)
        if self.journal:
            self._record(self.journal, told, shown)
        before = getattr(shown, "before", None)
        if shown.verdict is Verdict.HALT and before is not None:
            raise self.halt(shown, before, told.step)

    def halt(self, result: StepResult, before: ScaleState, step: int) -> TrainingHalted:
        self.due.clear()
        return TrainingHalted(
            explain_halt(result.cause, before, self.rule, step=step, culprits=result.culprits)
        )

    def event(self, key: str | None, step: int, result: StepResult, next_scale: float) -> None:
        """A skip, a retry or a halt."""
        detail = {
            "cause": result.cause.name,
            "scale": result.scale,
            "next_scale": next_scale,
            "culprits": [getattr(c, "described", c) for c in result.culprits],
            "micro_batch": result.micro_batch,
        }
        if key is not None:
            detail["key"] = key
        event = Event(step, str(result.verdict), detail)
        self.events.append(event)
        if self.journal:
            self.journal.event(event.what, step, **detail)
        if self.on_event is not None:
            self.on_event(event)

    def _warn_at_floor(self, result: StepResult) -> None:
        if result.cause is Cause.FLOOR and self.limits.on_floor == "warn":
            warnings.warn(
                f"non-finite gradients at the smallest scale, {result.scale:g}: the step was "
                f"skipped. Culprits: {', '.join(result.culprits) or 'unknown'}",
                stacklevel=6,
            )

    def _record(self, journal: Journal, told: Told, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        facts = told.facts()
        journal.step(
            Step(
                told.step,
                result.scale,
                facts.next_scale,
                amax=facts.amax,
                nonfinite=facts.nonfinite,
                loss=facts.loss,
                norm=facts.norm,
                lr=told.lr,
                verdict=result.verdict,
                cause=result.cause,
                culprits=result.culprits,
                retries=result.retries,
                seconds=seconds,
                probe_amax=facts.probe_amax,
                key=told.key or "",
            )
        )


def learning_rate(track: Track) -> float:
    """Of the first optimizer's first group, NaN if there is none."""
    for window in track.windows.values():
        for group in window.optimizer.param_groups:
            return float(group.get("lr", math.nan))
    return math.nan

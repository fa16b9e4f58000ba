"""The only place that makes steps, events and headers of a live run.

    adapter -> core.conclude -> Channel -> Journal

A `Recorder` is one run in one process. A `Channel` is one scale's part of it; the core calls it
when a step is finished. `current()` is the recorder of `gradlift run` or `gradlift.record`. Every
scale made meanwhile records to it, in addition to a journal of its own.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core import Finished, Note, StepResult, Verdict
from ..formats import FP16
from ..rules import Rule
from .records import Call, Calls, Event, Step
from .writer import Journal, JournalLike, opened

_LAST_EVENTS = 64

depth = 0
"""How many scalers or engines are inside their `step`. Hooks on optimizers record nothing there."""

_current: Recorder | None = None


class Recorder:
    """One run in one process: its journals, how often to sample, the callback.

    `rule` replaces the rule of every scale made meanwhile.

    >>> import tempfile, os
    >>> from gradlift.journal import Journal, read_journal
    >>> from gradlift.rules import parse
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> with Journal(path) as journal:
    ...     Channel("mine", parse("static:8"), Recorder(journal)).note(0, Note("greeting", "hello"))
    >>> read_journal(path).header["framework"], read_journal(path).events[0].detail["text"]
    ('mine', 'hello')
    """

    def __init__(
        self,
        *journals: Journal,
        every: int | None = None,
        rule: str | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.journals = journals
        self.every, self.rule, self.on_event = every, rule, on_event
        self.channels: list[Channel] = []
        """In the order of their first line."""
        self._waiting: list[Callable[[Journal], None]] = []

    def calls(self, step: int, order: tuple[Call, ...], count: int) -> None:
        """An order of calls, and in how many windows it was seen."""
        self._put(lambda journal: journal.calls(Calls(step, order, count)))

    def forward(self, step: int, modules: dict[str, dict[str, Any]]) -> None:
        """What modules returned in a forward pass."""
        self._put(lambda journal: journal.forward(step, modules))

    def weights(self, step: int, parameters: dict[str, dict[str, Any]]) -> None:
        """Statistics of weights and of their update."""
        self._put(lambda journal: journal.weights(step, parameters))

    def event(self, what: str, step: int | None, **detail: Any) -> None:
        """An event of the whole run."""
        self._put(lambda journal: journal.event(what, step, **detail))

    def _put(self, write: Callable[[Journal], None]) -> None:
        self._waiting.append(write)
        if self.channels:
            self.flush()

    def flush(self) -> None:
        """Writes lines that came before a scale or an optimizer had described the run."""
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            for journal in self.journals:
                write(journal)

    def label_of(self, channel: Channel) -> str:
        """The first scale of a run has no label; the second is "scaler 2"."""
        if channel not in self.channels:
            self.channels.append(channel)
        n = self.channels.index(channel) + 1
        return channel.label or ("" if n == 1 else f"scaler {n}")


def current() -> Recorder | None:
    """The recorder of `gradlift run` or `gradlift.record`; None in a child forked meanwhile.

    >>> current() is None
    True
    """
    return _current


def set_current(recorder: Recorder | None) -> None:
    """Every scale made from now on records to `recorder` too."""
    global _current
    _current = recorder


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: set_current(None))


def channel(
    framework: str,
    rule: Rule,
    *,
    journal: JournalLike | None = None,
    every: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Channel:
    """The channel of a new scale: to its own journal, if it has one, and to the current run.

    >>> from gradlift.rules import parse
    >>> channel("torch", parse("dynamic")).recording
    False
    """
    own = opened(journal)
    recorders = [Recorder(*([own] if own else []), every=every, on_event=on_event)]
    around = current()
    return Channel(framework, rule, *recorders, *([around] if around is not None else []))


class Channel:
    """One scale's connection to the journals. It takes steps in order, and writes each at once.

    >>> from gradlift.core import Finished, Cause, conclude
    >>> from gradlift import Reading
    >>> from gradlift.rules import Static
    >>> channel = Channel("mine", Static(8))
    >>> done = Finished(0, Static(8).init(), 8.0, Reading(True, 1.0), Cause.OVERFLOW)
    >>> _ = conclude(done, Static(8), listener=channel)
    >>> channel.events[0].what, channel.events[0].detail["cause"]
    ('skip', 'OVERFLOW')
    """

    def __init__(self, framework: str, rule: Rule, *recorders: Recorder, label: str = "") -> None:
        self.framework, self.rule, self.label = framework, rule, label
        self.recorders = recorders
        self.events: deque[Event] = deque(maxlen=_LAST_EVENTS)
        """The last skips, retries and halts."""
        self.keeps_events = True
        """Do skips go into `events`? Not if only a run around made them known."""
        self._facts: dict[str, Any] = {}
        self._places: list[tuple[Journal, str]] | None = None
        self._noted: set[str] = set()
        self._since = time.perf_counter()
        self._count_listeners()

    def _count_listeners(self) -> None:
        self.recording = any(r.journals for r in self.recorders)
        """Is there a journal? Then amax and norm are wanted, whether the rule needs them or not."""
        self.heard = self.recording or any(r.on_event for r in self.recorders)
        """Is there a journal or a callback? Then a step's numbers must be read from a device."""

    @property
    def own_journal(self) -> bool:
        """Was the scale given a journal itself?"""
        return bool(self.recorders) and bool(self.recorders[0].journals)

    @property
    def heard_by_user(self) -> bool:
        """Was the scale given a journal or a callback itself?"""
        return self.own_journal or bool(self.recorders and self.recorders[0].on_event)

    def leave_own_journal(self) -> None:
        """Drops the scale's own journal; the run of `current()` is still recorded."""
        own, self.recorders[0].journals = self.recorders[0].journals, ()
        self._places = self._places and self._places[len(own) :]  # they come first
        self._count_listeners()

    @property
    def described(self) -> bool:
        """Was the header written?"""
        return self._places is not None

    def describe(self, **facts: Any) -> None:
        """Adds facts to the header, before its line is written: `parameters` (name -> size),
        `world_size`. Parameters of several optimizers are merged."""
        parameters = {**self._facts.get("parameters", {}), **facts.pop("parameters", {})}
        self._facts.update(facts, **({"parameters": parameters} if parameters else {}))

    def _journals(self) -> list[tuple[Journal, str]]:
        """Each journal with this channel's label there; describes the run at the first line."""
        if self._places is None:
            labels = {r: r.label_of(self) for r in self.recorders}
            facts = {
                "rule": str(self.rule),
                "framework": self.framework,
                "formats": [str(getattr(self.rule, "format", FP16))],
                **self._facts,
            }
            for recorder, label in labels.items():
                for journal in recorder.journals:
                    if label:
                        journal.event("note", code="scale", key=label, **facts)
                    else:
                        journal.describe(**facts)
            self._places = [(j, label) for r, label in labels.items() for j in r.journals]
        return self._places

    def step(self, finished: Finished, result: StepResult) -> None:
        """A finished step: its event if it was not applied, its notes, its line."""
        if result.verdict is not Verdict.APPLY and result.skipped:
            self._event(finished, result, keep=self.keeps_events)
        for note in finished.notes:
            self.note(finished.step, note)
        if not self.recording:
            return
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        if not math.isnan(finished.seconds):
            seconds = finished.seconds
        reading = finished.reading
        bad = bool(reading.nonfinite)
        taken = reading.checked and not bad and not math.isinf(reading.amax)
        for journal, label in self._journals():
            journal.step(
                Step(
                    finished.step,
                    result.scale,
                    finished.next_scale,
                    amax=reading.amax if taken else math.nan,
                    nonfinite=bad,
                    loss=finished.loss,
                    norm=result.grad_norm,
                    lr=finished.lr,
                    verdict=result.verdict,
                    cause=result.cause,
                    culprits=result.culprits,
                    retries=result.retries,
                    seconds=seconds,
                    probe_amax=reading.probe_amax,
                    key=_joined(label, finished.key),
                )
            )

    def retry(self, finished: Finished, result: StepResult) -> None:
        """A try that is followed by another."""
        self._event(finished, result)

    def _event(self, finished: Finished, result: StepResult, *, keep: bool = True) -> None:
        detail = {
            "cause": result.cause.name,
            "scale": result.scale,
            "next_scale": finished.next_scale,
            "culprits": [getattr(c, "described", c) for c in result.culprits],
            "micro_batch": result.micro_batch,
        }
        what = str(result.verdict)
        event = Event(finished.step, what, _keyed(detail, finished.key))
        if keep:
            self.events.append(event)
        for journal, label in self._journals():
            journal.event(what, finished.step, **_keyed(detail, _joined(label, finished.key)))
        for recorder in self.recorders:
            if recorder.on_event is not None:
                recorder.on_event(event)

    def note(self, step: int | None, note: Note) -> None:
        """A sentence with a code; one that holds for the whole run is written once."""
        if note.once and note.code in self._noted:
            return
        self._noted.add(note.code)
        for journal, label in self._journals():
            journal.event("note", step, **_keyed({"code": note.code, "text": str(note)}, label))

    def sample_due(self, step: int) -> bool:
        """Is a sample of each parameter's gradient due at this step?"""
        for recorder in self.recorders:
            if recorder.journals and recorder.every and step % recorder.every == 0:
                return True
        return False

    def sample(
        self, step: int, parameters: dict[str, dict[str, Any]], *, due: bool = False
    ) -> None:
        """Statistics of each parameter's gradient, for the journals in which they are due; with
        `due` in all, such as at the start of a run that may be short."""
        self._journals()
        for recorder in self.recorders:
            if recorder.every and (due or step % recorder.every == 0):
                for journal in recorder.journals:
                    journal.sample(step, parameters)

    def probe(self, step: int, modules: dict[str, dict[str, Any]]) -> None:
        """Statistics of the gradients between modules."""
        for journal, _ in self._journals():
            journal.probe(step, modules)


def _joined(label: str, key: str) -> str:
    return f"{label}/{key}" if label and key else label or key


def _keyed(detail: dict[str, Any], key: str) -> dict[str, Any]:
    return {**detail, "key": key} if key else detail

"""Rows of a log, in their order, as steps of a run.

A log says less than a journal. What is worked out here: the number of a skipped step whose line has
none (it lies between the two numbered lines around it), the scale that a step carried (the one
after the step before), repeated lines of other ranks, and whether a step with a number that is not
finite was applied: if later numbers are finite again, it was not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core import Cause, Verdict
from ..journal import Event, Step
from .row import Row

MOST_STEPS = 2**19  # in memory; of a longer log every second uneventful step is left out
MOST_PENDING = 10_000  # skipped steps without a number of their own
FIRST_STEPS = 1000  # a first line up to here may count the skips since the start
NEAR = 64  # lines: other ranks repeat a message at once
RECENT = 7  # numbers of steps that are remembered
_BACKOFF = 2.0  # apex, fairseq and ColossalAI halve, and print only what is left


@dataclass(slots=True)
class _Draft:
    """A step that is not finished: the next lines may say more about it."""

    number: int | None
    line: int
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    next_scale: float | None = None
    skipped: bool = False
    bad_loss: bool = False
    floor: bool = False
    applied: bool = False
    """The log counts skips, and did not count this one."""
    halted: bool = False
    culprits: tuple[str, ...] = ()
    key: str = ""
    rank: int | None = None
    closed: bool = False
    """The log says nothing more about this overflow."""
    refused: bool = False
    """Skipped for a norm above the user's limit, which is no overflow."""
    grown: float | None = None
    """The scale was raised to this before the next step."""

    def fill(self, row: Row) -> None:
        """Takes what is not known yet."""
        self.loss = row.loss if self.loss is None else self.loss
        self.norm = row.norm if self.norm is None else self.norm
        self.lr = row.lr if self.lr is None else self.lr
        self.scale = row.scale if self.scale is None else self.scale
        self.next_scale = row.next_scale if self.next_scale is None else self.next_scale


class Assembly:
    """Collects rows; `steps` and `events` are finished by `end()`.

    >>> assembly = Assembly()
    >>> assembly.add(Row("deepspeed", scale=8.0, next_scale=4.0, skipped=True), line=1)
    >>> assembly.add(Row("deepspeed", step=1, skips_in_all=1), line=2)
    >>> assembly.end()
    >>> [(s.step, s.scale, s.next_scale, str(s.cause)) for s in assembly.steps]
    [(1, 8.0, 4.0, 'unknown non-finite')]
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.events: list[Event] = []
        self.repeated = self.guessed = self.thinned = self.kept_scale = 0
        """Lines of other ranks; steps whose number was worked out; steps left out; overflows that
        hysteresis let pass."""
        self._open: _Draft | None = None
        self._pending: list[_Draft] = []
        self._number: int | None = None
        self._before: int | None = None
        self._recent: dict[int, int] = {}  # the last numbers, and their lines
        self._scale: dict[str, float] = {}
        self._skips = 0  # in all, as the log counts
        self._refused = 0  # skips since the last numbered line that are no overflows
        self._seen_skips = 0  # since the last numbered line
        self._rank: int | None = None
        self._norms = False
        self._last_skipped = False
        self._unsettled: list[int] = []
        self._stride = 1
        self._ordinary = 0
        self._culprits: list[str] = []

    def add(self, row: Row, line: int, at: int | None = None) -> None:
        """One row, from this line; `at` is the number of steps that a progress bar shows."""
        if row.rank is not None:
            if self._rank is None:
                self._rank = row.rank
            elif row.rank != self._rank:
                self.repeated += 1
                return
        if row.culprit:
            self._culprits.append(row.culprit)
        elif row.too_large:
            self._refused += 1
            text = f"a step was skipped because its norm, {row.norm}, is above the trainer's limit"
            self.events.append(Event(self._number, "note", {"code": "norm-limit", "text": text}))
        elif row.skipped:
            self._skip(row, line, None if at is None else at + 1)
        elif row.loss is row.norm is None and row.scale is not None and row.next_scale is not None:
            self._moved(row)
        else:
            self._numbered(row, line, at)

    # messages about one overflow

    def _skip(self, row: Row, line: int, at: int | None) -> None:
        number = row.step if row.step is not None else at
        last = self._pending[-1] if self._pending else None
        self.kept_scale += row.hysteresis
        if last is not None and self._same(last, row, line, number):
            last.fill(row)
            last.floor |= row.floor
            last.closed |= row.closes
            if last.number is None:
                last.number = number
            return
        draft = _Draft(
            number,
            line,
            skipped=True,
            floor=row.floor,
            closed=row.closes,
            key=row.key,
            rank=row.rank,
        )
        draft.halted = row.floor and row.scale is None
        draft.fill(row)
        draft.culprits, self._culprits = tuple(dict.fromkeys(self._culprits)), []
        self._pending.append(draft)
        self._seen_skips += 1
        if len(self._pending) >= MOST_PENDING:
            self._place(None, 0)

    def _same(self, last: _Draft, row: Row, line: int, number: int | None) -> bool:
        """Is this line about the overflow of the last one? Several lines may tell of one overflow,
        and each rank may print them."""
        if number is not None and last.number is not None and number != last.number:
            return False
        if row.floor and row.scale is None and row.next_scale is None:  # an exception
            return last.halted
        if line - last.line > NEAR or row.key != last.key or row.static:
            return False
        if row.closes or last.closed:
            return not last.closed
        if last.scale is None and last.next_scale is None and not last.halted:
            return row.step is None or row.step == last.number
        if row.step is not None and row.step == last.number:
            same = None in (row.scale, last.scale) or row.scale == last.scale
            self.repeated += same
            return same  # fairseq2 tries the same step again, at a lower scale
        moved = row.next_scale is not None and row.scale != row.next_scale
        ranked = row.rank is not None and last.rank is not None
        if not ranked and moved and not row.hysteresis and row.next_scale == last.next_scale:
            self.repeated += row.scale == last.scale
            return row.scale is None or last.scale is None or row.scale == last.scale
        return False

    def _moved(self, row: Row) -> None:
        """A line that only says where the scale went."""
        if row.next_scale is None:
            return
        if self._pending:
            self._pending[-1].grown = row.next_scale
            return
        self._flush_open()
        self._scale[row.key] = row.next_scale

    # lines with the numbers of a step

    def _numbered(self, row: Row, line: int, at: int | None) -> None:
        number = row.step if row.step is not None else at
        if number is None:
            number = (self._number or 0) + self._next(row)
        if line - self._recent.get(number, -NEAR - 1) <= NEAR and number != self._number:
            self.repeated += 1  # a rank that is late
            return
        if self._open is not None and number == self._open.number and not self._pending:
            self._say_more(row, line)
            return
        self._flush_open()
        before = self._number
        if before is not None and number < before:
            self._restart(before, number)
            before = None
        slots = None
        if row.counted and (before is not None or number <= FIRST_STEPS):
            slots = number - (before or 0)
        refused, self._refused = self._refused, 0
        if refused and row.skips is not None:
            row = row._replace(skips=max(0, row.skips - refused))
        self._hide(self._count(row, slots), row.bad_losses, line)
        itself = bool(self._pending) and row.counted and self._about_itself(row, number, slots)
        draft = self._pending.pop() if itself else _Draft(number, line)
        draft.number = number
        draft.fill(row)
        draft.applied = not itself and (row.skips is not None or row.skips_in_all is not None)
        draft.refused = refused > 0 and slots == 1
        first = (before or 0) + 1
        if before is not None and slots and not self._last_skipped:
            first = max(first, number - len(self._pending))  # as if in a row, up to this line
        self._place(number, first)
        self._before, self._number, self._open = before, number, draft
        self._recent[number] = line
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._norms |= row.norm is not None

    def _about_itself(self, row: Row, number: int, slots: int | None) -> bool:
        """Was the step of a numbered line the last of those that were skipped?"""
        if self._pending[-1].number is not None:
            return self._pending[-1].number == number
        if slots is not None and len(self._pending) >= slots > 0:
            return True
        if row.skips and row.norm is None and self._norms:  # Megatron leaves it out then
            return True
        unknown = row.loss is None and row.norm is None
        return unknown and self._number is not None and not self._last_skipped

    def _next(self, row: Row) -> int:
        """How far a line without a number is from the one before: the overflows between them count,
        and the line may be about the last of these."""
        waiting = len(self._pending) if row.counted else 0
        about_it = waiting and row.norm is not None and not math.isfinite(row.norm)
        return waiting + (not about_it)

    def _say_more(self, row: Row, line: int) -> None:
        """Another line about the same step."""
        assert self._open is not None
        hidden = self._count(row, 0)
        if hidden:
            opened, self._open = self._open, None
            self._hide(hidden, row.bad_losses, line)
            number = opened.number or 0
            first = number - hidden if self._before is None else self._before + 1
            self._place(number, first)
            self._open = opened
        self._open.fill(row)
        self._norms |= row.norm is not None

    def _hide(self, skips: int, bad_losses: int, line: int) -> None:
        """Skipped steps that were only counted."""
        for i in range(min(skips, MOST_PENDING)):
            bad = i >= skips - bad_losses
            self._pending.append(_Draft(None, line, skipped=True, bad_loss=bad))

    def _count(self, row: Row, slots: int | None) -> int:
        """How many steps were skipped since the last numbered line, without a line of their own."""
        seen, self._seen_skips = self._seen_skips, 0
        if row.skips is not None:
            return max(0, row.skips - seen)
        if row.skips_in_all is None:
            self._skips += seen
            return 0
        hidden = row.skips_in_all - self._skips - seen
        if row.skips_in_all < self._skips:
            hidden = 0
        if hidden > 0 and slots is None:
            text = f"{hidden} steps had been skipped before this line"
            self.events.append(Event(row.step, "note", {"code": "skipped-before", "text": text}))
            hidden = 0
        self._skips = row.skips_in_all
        return max(0, hidden)

    def _restart(self, before: int, number: int) -> None:
        text = f"the step number goes back from {before} to {number}: the run was resumed"
        self.events.append(Event(number, "resume", {"text": text, "scale": self._scale.get("")}))
        self._scale.clear()
        self._skips = 0

    def _place(self, end: int | None, first: int) -> None:
        """Gives the pending overflows their numbers, below `end`, and finishes them."""
        drafts, self._pending = self._pending, []
        number = first if end is not None else (self._number or 0) + 1
        if drafts:
            self._flush_open()
        for draft in drafts:
            if draft.number is None:
                self.guessed += 1
                draft.number = number if end is None else max(0, min(number, end))
            number = draft.number + 1
            self._finish(draft)
            if end is None:
                self._number = draft.number

    def _flush_open(self) -> None:
        draft, self._open = self._open, None
        if draft is not None:
            self._finish(draft)

    # finished steps

    def _finish(self, d: _Draft) -> None:
        scale = d.scale if d.scale is not None else self._scale.get(d.key)
        if scale is None and d.next_scale is not None:
            scale = d.next_scale * _BACKOFF if d.skipped else d.next_scale
        after = d.next_scale if d.next_scale is not None else scale
        bad_loss = d.bad_loss or (d.loss is not None and not math.isfinite(d.loss))
        bad_norm = d.norm is not None and not math.isfinite(d.norm)
        verdict: Verdict | None = Verdict.APPLY
        cause = Cause.NONE
        if d.skipped:
            verdict = Verdict.HALT if d.halted else Verdict.SKIP
            cause = Cause.FLOOR if d.floor else Cause.UNKNOWN_NONFINITE
        elif d.refused:
            verdict = None
        elif bad_loss or bad_norm:
            verdict = Verdict.APPLY if d.applied else None
            cause = Cause.UNKNOWN_NONFINITE
        if bad_loss:
            cause = Cause.LOSS_NONFINITE
        step = Step(
            d.number or 0,
            math.nan if scale is None else scale,
            math.nan if after is None else after,
            nonfinite=d.skipped or bad_norm,
            loss=math.nan if d.loss is None else d.loss,
            norm=math.nan if d.norm is None else d.norm,
            lr=math.nan if d.lr is None else d.lr,
            verdict=verdict,
            cause=cause,
            culprits=d.culprits,
            key=d.key,
        )
        if after is not None:
            self._scale[d.key] = after if d.grown is None else d.grown
        self._last_skipped = d.skipped
        self._keep(step, d)

    def _keep(self, step: Step, d: _Draft) -> None:
        if step.verdict is None and step.cause is not Cause.NONE:
            self._unsettled.append(len(self.steps))
        elif step.cause is Cause.NONE:
            sound = d.norm is not None if self._norms else bool(d.loss)
            if sound and self._unsettled:
                self._settle()
            self._ordinary += 1
            if self._ordinary % self._stride:
                self.thinned += 1
                return
        self.steps.append(step)
        if len(self.steps) >= MOST_STEPS:
            self._thin()

    def _settle(self) -> None:
        """Weights are finite, so the steps before that were not applied."""
        for i in self._unsettled:
            self.steps[i] = self.steps[i]._replace(verdict=Verdict.SKIP)
        self._unsettled = []

    def _thin(self) -> None:
        self._stride *= 2
        ordinary, kept = 0, []
        for step in self.steps:
            ordinary += step.cause is Cause.NONE
            if step.cause is not Cause.NONE or ordinary % 2:
                kept.append(step)
        if len(kept) > MOST_STEPS * 3 // 4:  # nearly all are bad
            kept = kept[::2]
        self.thinned += len(self.steps) - len(kept)
        self.steps = kept
        self._unsettled = [
            i for i, s in enumerate(kept) if s.verdict is None and s.cause is not Cause.NONE
        ]

    def end(self) -> None:
        """No row will follow."""
        self._place(None, 0)
        self._flush_open()

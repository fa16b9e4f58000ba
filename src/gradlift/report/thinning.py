"""Fewer points for long runs: the extremes of each range of steps, and every bad step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ..analysis import words
from ..analysis.exponents import culprit_of
from ..journal import Event, Run, Step

BUCKETS = 1000
MOST_MARKS = 10_000
MOST_PARAMETERS = 2000  # of the page; the worst come first


class Mark(NamedTuple):
    """One bad step, or several of the same kind that a chart shows as one."""

    first: int
    last: int
    times: int
    what: str
    cause: str
    scale: float
    """Of the first of them."""
    next_scale: float
    """Of the last of them."""
    culprit: str
    """The first culprit of the first of them."""
    others: int = 0
    """More culprits beside it."""
    key: str = ""


def thin(
    series: Sequence[Sequence[float]], keep: Iterable[int] = (), buckets: int = BUCKETS
) -> list[int]:
    """Indices to draw: the ends and, for each series, the extremes of every bucket, and `keep`.

    A bucket is a range of neighbouring steps. Short series are kept whole. NaN and inf are gaps,
    and no extremes.

    >>> thin([[0.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0]], buckets=1)
    [0, 1, 8, 9]
    """
    n = len(series[0])
    if n <= buckets * (2 + 2 * len(series)):
        return list(range(n))
    chosen = {i for i in keep if 0 <= i < n}
    for bucket in range(buckets):
        start, stop = bucket * n // buckets, (bucket + 1) * n // buckets
        chosen.update((start, stop - 1))
        for values in series:
            here = values[start:stop]
            finite = [v for v in here if v - v == 0]
            if finite:
                chosen.update((start + here.index(min(finite)), start + here.index(max(finite))))
    return sorted(chosen)


def spread(n: int, most: int) -> list[int]:
    """At most `most` of n indices, evenly, the first and the last among them.

    >>> spread(10, 4), spread(2, 4), spread(0, 4)
    ([0, 3, 6, 9], [0, 1], [])
    """
    if n <= most:
        return list(range(n))
    return [i * (n - 1) // (most - 1) for i in range(most)]


def marks(run: Run, most: int = MOST_MARKS) -> list[Mark]:
    """Every step that was skipped and every retry, in the order of steps.

    Neighbours that are alike in everything become one mark with their number. If more than `most`
    are left, neighbours of one kind become one mark, so that each bad step is inside a mark and the
    numbers add up.

    >>> from gradlift import Cause, Verdict
    >>> from gradlift.journal import Step
    >>> bad = dict(verdict=Verdict.SKIP, cause=Cause.OVERFLOW)
    >>> run = Run(steps=[Step(0, 8.0, 4.0, **bad), Step(1, 4.0, 2.0, **bad), Step(2, 2.0, 2.0)])
    >>> [(mark.first, mark.scale, mark.cause) for mark in marks(run)]
    [(0, 8.0, 'overflow'), (1, 4.0, 'overflow')]
    """
    found = [_of_step(s) for s in run.steps if s.skipped]
    marked = {(m.first, m.key) for m in found}
    found += [
        mark
        for mark in map(_of_event, run.events)
        if mark and (mark.what == "retry" or (mark.first, mark.key) not in marked)
    ]
    found.sort(key=lambda mark: mark.first)
    alike = _joined(found, lambda m: (m.what, m.cause, m.scale, m.culprit, m.key))
    return crowded(alike, most)


def streaks(run: Run) -> list[Mark]:
    """Steps in a row that were skipped for one cause, as one mark; loss by loss.

    >>> from gradlift import Cause, Verdict
    >>> from gradlift.journal import Step
    >>> bad = dict(verdict=Verdict.SKIP, cause=Cause.OVERFLOW)
    >>> run = Run(steps=[Step(0, 8.0, 4.0, **bad), Step(1, 4.0, 2.0, **bad), Step(2, 2.0, 2.0)])
    >>> [(mark.first, mark.last, mark.times, mark.cause) for mark in streaks(run)]
    [(0, 1, 2, 'overflow')]
    """
    by_key = [[_of_step(s) for s in steps if s.skipped] for steps in run.by_key.values()]
    return [mark for found in by_key for mark in _joined(found, lambda m: m.cause)]


def _of_step(s: Step) -> Mark:
    return Mark(
        s.step,
        s.step,
        1,
        str(s.verdict),
        str(s.cause),
        s.scale,
        s.next_scale,
        s.culprits[0] if s.culprits else "",
        max(0, len(s.culprits) - 1),
        s.key,
    )


def _of_event(event: Event) -> Mark | None:
    if event.what not in ("skip", "retry", "halt") or event.step is None:
        return None
    detail = event.detail
    culprits = detail.get("culprits") or [""]
    return Mark(
        event.step,
        event.step,
        1,
        event.what,
        words.cause(detail.get("cause", "")),
        float(detail.get("scale", math.nan)),
        float(detail.get("next_scale", math.nan)),
        str(culprit_of(culprits[0])),
        len(culprits) - 1,
        str(detail.get("key", "")),
    )


def _joined(found: list[Mark], kind: Callable[[Mark], Hashable]) -> list[Mark]:
    """Neighbours of the same kind whose steps follow on each other, as one."""
    joined: list[Mark] = []
    for mark in found:
        last = joined[-1] if joined else None
        if last and kind(last) == kind(mark) and 0 <= mark.first - last.last <= 1:
            joined[-1] = _as_one([last, mark])
        else:
            joined.append(mark)
    return joined


def crowded(found: list[Mark], most: int) -> list[Mark]:
    """About `most` marks: too many of one kind are joined in equal groups.

    >>> many = [Mark(i, i, 1, "skip", "overflow", 8.0, 8.0, "") for i in range(10)]
    >>> [(mark.first, mark.last, mark.times) for mark in crowded(many, 2)]
    [(0, 4, 5), (5, 9, 5)]
    """
    if len(found) <= most:
        return found
    size = math.ceil(len(found) / most)
    by_kind: dict[Hashable, list[Mark]] = {}
    for mark in found:
        by_kind.setdefault((mark.what, mark.cause, mark.key), []).append(mark)
    groups = [alike[i : i + size] for alike in by_kind.values() for i in range(0, len(alike), size)]
    return sorted(map(_as_one, groups), key=lambda mark: mark.first)


def _as_one(group: list[Mark]) -> Mark:
    return group[0]._replace(
        last=max(mark.last for mark in group),
        times=sum(mark.times for mark in group),
        next_scale=group[-1].next_scale,
    )

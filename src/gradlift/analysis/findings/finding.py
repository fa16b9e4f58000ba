"""What a finding is, and the functions on steps that several findings use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...core import Cause
from ...journal import Run, Step

SEVERITIES = ("broken", "warning", "hint")
SHOWN = 10  # steps or parameters that a finding lists: enough to look at, short enough to read


class Finding(NamedTuple):
    """One thing that is wrong with a run, or that could be better.

    >>> Finding("hint", "odd scale", "The scale was 1000.", kind="odd-scale").severity
    'hint'
    """

    severity: str
    """"broken": training does not work; "warning": it loses something; "hint": it could gain."""
    title: str
    evidence: str
    """The numbers that show it."""
    steps: tuple[int, ...] = ()
    """Steps to look at, the first few."""
    parameters: tuple[str, ...] = ()
    advice: str = ""
    kind: str = ""
    """A short fixed name: "floor", "underflow", ..."""
    place: str = ""
    """File and line of the script."""
    confidence: str = "likely"
    """"certain": seen directly; "likely": inferred; "possible": the intent cannot be known."""
    diff: str = ""
    """The advice as a change of the script's lines, if they are known: "train.py:31", then lines
    that begin with "-" (goes), "+" (comes) or a blank (stays)."""


Check = Callable[[Run], "Finding | None"]


def per_key(check: Callable[[list[Step], Run], Finding | None]) -> Check:
    """Runs a check of one key's steps for each key of a run; returns the most serious finding."""

    def checked(run: Run) -> Finding | None:
        worst: Finding | None = None
        for key, steps in run.by_key.items():
            found = check(steps, run)
            if found and key:
                found = found._replace(title=f"{found.title} (loss {key!r})")
            if found and (worst is None or rank(found) < rank(worst)):
                worst = found
        return worst

    checked.__name__, checked.__doc__ = check.__name__, check.__doc__
    return checked


def rank(finding: Finding) -> int:
    """0 for the most serious."""
    return SEVERITIES.index(finding.severity)


def loss_failed(step: Step) -> bool:
    """Was the loss itself inf or NaN? (A NaN in the record means: not known.)"""
    return step.cause is Cause.LOSS_NONFINITE or math.isinf(step.loss)


def of_a_log(run: Run) -> bool:
    """Was the run read from somebody's log, which has no gradients by parameter?"""
    return run.header.get("mode") == "log"


def spanned(steps: list[Step], run: Run) -> int:
    """How many steps of training these are. A log names only some of them."""
    if not steps or not of_a_log(run):
        return len(steps)
    return max(len(steps), steps[-1].step - steps[0].step + 1)


def overflowed(step: Step) -> bool:
    """Was the step skipped because of its gradients, the loss being finite or not known?"""
    return step.skipped and not loss_failed(step)


def leader(steps: list[Step]) -> tuple[str, int]:
    """The parameter that was most often the first non-finite one, and how often; "" if unknown.

    >>> leader([Step(0, 8.0, 4.0, culprits=("b", "a")), Step(1, 4.0, 2.0, culprits=("b",))])
    ('b', 2)
    """
    counts: dict[str, int] = {}
    for s in steps:
        if s.culprits:
            counts[s.culprits[0]] = counts.get(s.culprits[0], 0) + 1
    return max(counts.items(), key=lambda item: item[1], default=("", 0))


def numbers(steps: list[Step]) -> tuple[int, ...]:
    """The first few step numbers, for `Finding.steps`."""
    return tuple(dict.fromkeys(s.step for s in steps[:SHOWN]))

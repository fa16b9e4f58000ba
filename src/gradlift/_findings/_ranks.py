"""Ranks that no longer do the same: their journals lie beside rank 0's, and must agree."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from .._words import power
from ..errors import JournalError, JournalWarning
from ..journal import Run, Step, read_journal
from ._finding import SHOWN, Finding, by_key

_NAME = re.compile(r"rank-(\d+)\.jsonl")


def ranks(run: Run) -> Finding | None:
    """A rank that took another scale or another verdict than rank 0: their weights differ now."""
    apart: dict[int, tuple[Step, Step]] = {}
    others = _others(run.path)
    for rank, steps in others.items():
        difference = _first_difference(by_key(run.steps), by_key(steps))
        if difference:
            apart[rank] = difference
    if not apart:
        return None
    rank, (here, there) = min(apart.items(), key=lambda item: item[1][0].step)
    names = ", ".join(map(str, sorted(apart)[:SHOWN]))
    return Finding(
        "broken",
        "The ranks are out of step",
        f"{len(apart)} of {len(others)} other ranks went another way than rank 0 (rank {names}). "
        f"First at step {here.step}: rank 0 {_said(here)}, rank {rank} {_said(there)}. From there "
        "on their weights differ.",
        (here.step,),
        (),
        "Let the ranks decide together: GradScaler(process_group=group).",
        "ranks",
    )


def _others(path: Path | None) -> dict[int, list[Step]]:
    """The steps of the other ranks; a journal that cannot be read says nothing."""
    found: dict[int, list[Step]] = {}
    if path is None or not path.parent.is_dir():
        return found
    for file in path.parent.iterdir():
        match = _NAME.fullmatch(file.name)
        if match and file != path:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", JournalWarning)
                    found[int(match[1])] = read_journal(file).steps
            except JournalError:
                continue
    return dict(sorted(found.items()))


def _first_difference(
    here: dict[str, list[Step]], there: dict[str, list[Step]]
) -> tuple[Step, Step] | None:
    """The first pair that differs; a journal that merely ends earlier does not."""
    pairs = [
        (a, b)
        for key in here.keys() & there.keys()
        for a, b in zip(here[key], there[key])
        if a.scale != b.scale or a.verdict is not b.verdict
    ]
    return min(pairs, key=lambda pair: pair[0].step, default=None)


def _said(step: Step) -> str:
    verdict = "could not tell" if step.verdict is None else _DID[step.verdict.name]
    return f"{verdict} at {power(step.scale)}"


_DID = {"APPLY": "stepped", "SKIP": "skipped", "RETRY": "retried", "HALT": "halted"}

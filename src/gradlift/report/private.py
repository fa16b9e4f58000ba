"""A run without the script's code, lines, command and paths, to be sent to somebody."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..analysis.findings.calls import orders
from ..journal import Call, Calls, Run

_LEFT_OUT = ("command", "place", "before", "frames", "file", "lines")
_PATH = re.compile(
    r"""(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'"`:,;()<>]+){2,}  # /home/ada/train.py
    |[^\s/\\'"`(<]+\.(?:py|ipynb)\b                                 # train.py
    |<(?:string|stdin|ipython-input[^>]*)>""",
    re.VERBOSE,
)
_LINE = re.compile(r"(?<=\(a path\)):\d+")


def without_source(run: Run) -> Run:
    """The same run without code, places, command and paths: texts have "(a path)" instead.

    >>> calls = [Calls(0, (Call("step", "train.py:9"),))]
    >>> made = without_source(Run(header={"command": ["train.py"]}, calls=calls))
    >>> made.header, made.calls[0].order[0].place
    ({}, '')
    """
    return replace(
        run,
        header=_clean(run.header),
        events=[e._replace(detail=_clean(e.detail)) for e in run.events if e.what != "source"],
        calls=_without_places(run),
        path=None,
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _hidden(value)
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items() if k not in _LEFT_OUT}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value


def _hidden(text: str) -> str:
    """A text whose paths are left out.

    >>> _hidden("No such file: '/home/ada/data.txt', see train.py:12; 3/4 of layers.0/kernel")
    "No such file: '(a path)', see (a path); 3/4 of layers.0/kernel"
    """
    return _LINE.sub("", _PATH.sub("(a path)", text))


def _without_places(run: Run) -> list[Calls]:
    """Orders of calls that differ in nothing but lines become one, and their counts are added."""
    merged: dict[tuple[Call, ...], Calls] = {}
    for calls in orders(run):
        bare = tuple(call._replace(place="") for call in calls.order)
        seen = merged.get(bare)
        times = calls.times + (seen.times if seen else 0)
        first = min(calls.step, seen.step) if seen else calls.step
        merged[bare] = calls._replace(step=first, order=bare, times=times)
    return list(merged.values())

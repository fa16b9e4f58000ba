"""The lines of a script that a recorded run kept."""

from __future__ import annotations

from ..journal import Run

Source = dict[str, dict[int, str]]
"""File -> line number -> text."""


def source_of(run: Run) -> Source:
    """The lines that the journal has; a line that was not recorded is missing.

    >>> from gradlift.journal import Event
    >>> lines = {"3": "loss.backward()"}
    >>> source_of(Run(events=[Event(None, "source", {"file": "train.py", "lines": lines})]))
    {'train.py': {3: 'loss.backward()'}}
    """
    found: Source = {}
    for event in run.events:
        file, lines = event.detail.get("file"), event.detail.get("lines")
        if event.what == "source" and isinstance(file, str) and isinstance(lines, dict):
            kept = found.setdefault(file, {})
            kept.update({int(n): t for n, t in lines.items() if _is_line(n, t)})
    return found


def _is_line(number: object, text: object) -> bool:
    return isinstance(number, str) and number.isdecimal() and isinstance(text, str)


def line_at(source: Source, place: str) -> str | None:
    """The text of "train.py:34", or None.

    >>> line_at({"train.py": {3: "loss.backward()"}}, "train.py:3")
    'loss.backward()'
    """
    file, _, number = place.rpartition(":")
    return source.get(file, {}).get(int(number)) if number.isdecimal() else None

"""Which lines are the script's own, how they are written, and their text."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from pathlib import Path

from ..journal import Recorder

_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)
_PACKAGES = ("site-packages", "dist-packages")
_AROUND = 3  # lines before and after one that was shown
_MOST_LINES = 2000
_LONGEST = 200  # characters of a line


class Places:
    """Lines of a script as "train.py:34", relative to the folder of the script.

    With `source`, the text of these lines and of those around them is written to the journal.

    >>> places = Places()
    >>> places.place(os.__file__, 1) is None
    True
    """

    def __init__(self, *, source: bool = False) -> None:
        self._source = source
        self._new: dict[str, list[tuple[str, int]]] = {}
        self._written: dict[str, set[int]] = {}
        self._home: str | None = None
        """The folder of the script, once it runs."""
        self._own: dict[str, bool] = {}
        self._shown: dict[tuple[str, int], str] = {}

    def place(self, file: str, line: int) -> str | None:
        """A line of the script; None for one of a library."""
        if self._home is None:
            script = sys.argv[0] if sys.argv else ""
            self._home = os.path.dirname(os.path.abspath(script)) + os.sep if script else ""
        own = self._own.get(file)
        if own is None:
            own = self._own[file] = not _is_library(file)
        if not own:
            return None
        shown = self._shown.get((file, line))
        if shown is None:
            name = file.removeprefix(self._home)
            shown = self._shown[file, line] = f"{name}:{line}"
            if self._source:
                self._new.setdefault(name, []).append((file, line))
        return shown

    def write_source(self, recorder: Recorder) -> None:
        """Writes the text of lines that were shown since the last time, and of those around."""
        new, self._new = self._new, {}
        for name, shown in new.items():
            written = self._written.setdefault(name, set())
            lines = {}
            for file, line in shown:
                text = linecache.getlines(file)
                for at in range(max(1, line - _AROUND), min(len(text), line + _AROUND) + 1):
                    if at not in written and len(written) < _MOST_LINES:
                        written.add(at)
                        lines[str(at)] = text[at - 1].rstrip()[:_LONGEST]
            if lines:
                recorder.event("source", None, file=name, lines=lines)

    def of(self, frame: types.FrameType | None) -> str:
        """The innermost line of the script that is being executed; "" if there is none."""
        known = self._own
        while frame is not None:
            file = frame.f_code.co_filename
            if known.get(file, True):
                shown = self.place(file, frame.f_lineno)
                if shown is not None:
                    return shown
            frame = frame.f_back
        return ""


def _is_library(file: str) -> bool:
    if any(name in file for name in _PACKAGES) or file.startswith("<frozen"):
        return True
    return file.startswith(_LIBRARIES)

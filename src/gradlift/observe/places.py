"""Which lines are the script's own, and how they are written."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from pathlib import Path

_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)
_PACKAGES = ("site-packages", "dist-packages")


class Places:
    """Lines of a script as "train.py:34", relative to the folder of the script.

    >>> places = Places()
    >>> places.place(os.__file__, 1) is None
    True
    """

    def __init__(self) -> None:
        script = sys.argv[0] if sys.argv else ""
        self._home = os.path.dirname(os.path.abspath(script)) + os.sep if script else ""
        self._own: dict[str, bool] = {}
        self._shown: dict[tuple[str, int], str] = {}

    def place(self, file: str, line: int) -> str | None:
        """A line of the script; None for one of a library."""
        own = self._own.get(file)
        if own is None:
            own = self._own[file] = not _is_library(file)
        if not own:
            return None
        shown = self._shown.get((file, line))
        if shown is None:
            shown = self._shown[file, line] = f"{file.removeprefix(self._home)}:{line}"
        return shown

    def of(self, frame: types.FrameType | None) -> str:
        """The innermost line of the script that is being executed; "" if there is none."""
        while frame is not None:
            shown = self.place(frame.f_code.co_filename, frame.f_lineno)
            if shown is not None:
                return shown
            frame = frame.f_back
        return ""


def _is_library(file: str) -> bool:
    if any(name in file for name in _PACKAGES) or file.startswith("<frozen"):
        return True
    return file.startswith(_LIBRARIES)

"""How a recorded script or block of code ended, in plain data."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

from .stopping import Stopped

_FRAMES = 5  # the last of the script's own
_LONGEST = 500  # characters of a message


def ending(
    error: BaseException | None, place: Callable[[str, int], str | None], status: Any = 0
) -> dict[str, Any]:
    """Facts of an ending; `place` gives "train.py:34" for a line of the script, None for a line of
    a library.

    >>> ending(None, lambda file, line: None)
    {'how': 'finished'}
    >>> ending(KeyError("label"), lambda file, line: None)
    {'how': 'exception', 'type': 'KeyError', 'message': "'label'", 'frames': []}
    """
    if error is None:
        return (
            {"how": "finished"} if status in (0, None) else {"how": "exit", "status": str(status)}
        )
    if isinstance(error, SystemExit):
        return ending(None, place, error.code)
    if isinstance(error, Stopped):
        return {"how": "stopped", "message": str(error)}
    how = "exception" if isinstance(error, Exception) else "interrupted"
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        shown = place(file, line)
        if shown is not None:
            source = linecache.getline(file, line).strip()
            frames.append([shown, frame.f_code.co_name, source])
    message = str(error)[:_LONGEST]
    name = type(error).__name__
    return {"how": how, "type": name, "message": message, "frames": frames[-_FRAMES:]}

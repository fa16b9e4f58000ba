"""Calls back once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


def when_imported(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` right after somebody has imported `name`; at once if that has been done.

    What it returns ends the waiting.

    >>> seen = []
    >>> stop = when_imported("sys", lambda: seen.append("sys is there"))
    >>> seen
    ['sys is there']
    """
    if name in sys.modules:
        then()
        return lambda: None
    waiting = _Imported(name, then)
    sys.meta_path.insert(0, waiting)
    return waiting.stop


class _Imported(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        at = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(at, self)  # it may only have been asked for, not imported
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    self.stop()
                    self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

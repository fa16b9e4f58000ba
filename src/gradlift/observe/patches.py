"""Attributes exchanged for a while, and put back."""

from __future__ import annotations

import sys
from typing import Any


class Patches:
    """Exchanges attributes of classes and modules; `restore` puts back what was there.

    What somebody else has put in place of ours meanwhile is left alone.

    >>> class Kind:
    ...     size = 1
    >>> patches = Patches()
    >>> patches.attribute(Kind, "size", 2), patches.attribute(Kind, "colour", "red")
    (None, None)
    >>> Kind.size, Kind.colour
    (2, 'red')
    >>> patches.restore()
    >>> Kind.size, hasattr(Kind, "colour")
    (1, False)
    """

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, bool, Any, Any]] = []
        self._names: list[tuple[str, Any, Any]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value` from now on."""
        there = name in vars(owner)
        self._attributes.append((owner, name, there, vars(owner).get(name), value))
        setattr(owner, name, value)

    def everywhere(self, name: str, original: Any, value: Any) -> None:
        """Every module that has `original` under `name` has `value` there."""
        self._names.append((name, original, value))
        _exchange(name, original, value)

    def restore(self) -> None:
        for name, original, value in reversed(self._names):
            _exchange(name, value, original)  # in modules that were imported since, too
        for owner, name, there, before, value in reversed(self._attributes):
            if vars(owner).get(name) is not value:
                continue
            if there:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        self._names, self._attributes = [], []


def _exchange(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = new

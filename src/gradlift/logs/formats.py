"""What a format of console lines is: its name, what it shows, what it hides, how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .row import Row

Reader = Callable[[str], Iterable[Row]]


class LineFormat(NamedTuple):
    """A format whose lines are recognised one by one.

    >>> LineFormat("mine", "1.0", ("loss",), (), {"loss=": lambda line: [Row("mine")]}).name
    'mine'
    """

    name: str
    versions: str
    reads: tuple[str, ...]
    cannot: tuple[str, ...]
    """What cannot be known from it."""
    readers: dict[str, Reader]
    """A piece of text that a line must contain -> what reads such a line."""
    wraps: tuple[str, ...] = ()
    """Beginnings of messages that terminals are known to cut in two."""


class FileFormat(NamedTuple):
    """A format that is a whole file: JSON, a table, TensorBoard's events.

    >>> FileFormat("csv", "any", ("loss",), ()).cannot
    ()
    """

    name: str
    versions: str
    reads: tuple[str, ...]
    cannot: tuple[str, ...]

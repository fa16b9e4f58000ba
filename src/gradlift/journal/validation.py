"""What a value in a journal may be: its type, its range, its length, its depth.

A file may hold anything. Each function here returns the value in the form
that the rest of gradlift relies on, or raises `ValueError`; the reader then counts the line as
damaged and leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..text import visible

LONGEST_LINE = 2**26  # bytes
MOST_KEYS = 1000  # losses with a scale of their own
MOST_NAMES = 200_000  # parameters and modules
MOST_CALLS = 1000  # in one window
LONGEST_TEXT = 10_000  # characters; longer texts are cut
DEEPEST = 16  # lists and dictionaries inside each other
_LARGEST = 2**63
_EXPONENTS = frozenset(map(str, range(-1100, 1101)))  # float64 has -1074 to 1023


class Distinct:
    """The keys and the names that a journal has; ValueError for one too many."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._names: set[str] = set()

    def key(self, key: str) -> None:
        if key not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                raise ValueError("too many keys")
            self._keys.add(key)

    def names(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._names]
        if len(self._names) + len(new) > MOST_NAMES:
            raise ValueError("too many names")
        self._names.update(new)


def number(value: Any) -> float:
    """A float; inf and NaN are texts in a journal.

    >>> number(2), number("inf")
    (2.0, inf)
    """
    if type(value) is float:
        return value
    if (type(value) is int and abs(value) < _LARGEST) or value in ("inf", "-inf", "nan"):
        return float(value)
    raise ValueError("not a number")


def count(value: Any) -> int:
    """A whole number from 0 to 2^63 - 1.

    >>> count(3)
    3
    """
    if type(value) is int and 0 <= value < _LARGEST:
        return value
    raise ValueError("not a count")


def share(value: Any) -> float:
    """A number from 0 to 1.

    >>> share(0.25)
    0.25
    """
    found = number(value)
    if 0 <= found <= 1:
        return found
    raise ValueError("not a share")


def text(value: Any) -> str:
    """A text that is safe to print.

    >>> text("head.weight")
    'head.weight'
    """
    if not isinstance(value, str):
        raise ValueError("not a text")
    return visible(value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 3] + "...")


def texts(value: Any) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        raise ValueError("not a list")
    return [text(each) for each in value]


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """Any JSON value, with every text in it safe to print.

    >>> plain({"command": ["train.py", 3, None]})
    {'command': ['train.py', 3, None]}
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, (list, dict)):
        if not depth:
            raise ValueError("nested too deeply")
        if isinstance(value, list):
            return [plain(each, depth - 1) for each in value]
        return {text(name): plain(each, depth - 1) for name, each in value.items()}
    return number(value) if type(value) is int and abs(value) >= _LARGEST else value


def statistics(value: Any) -> dict[str, Any]:
    """What a sample has of one parameter, or a probe of one module.

    >>> statistics({"elements": 4, "zero": 0.5, "exponents": {"-3": 2}})
    {'elements': 4, 'zero': 0.5, 'exponents': {'-3': 2}}
    """
    if not isinstance(value, dict):
        raise ValueError("not statistics")
    return {text(name): _STATISTICS.get(name, plain)(each) for name, each in value.items()}


def _exponents(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not _EXPONENTS.issuperset(value):
        raise ValueError("not counts by exponent")
    return {exponent: count(n) for exponent, n in value.items()}


def _sizes(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise ValueError("not sizes by name")
    return {text(name): count(size) for name, size in value.items()}


def _optional_count(value: Any) -> int | None:
    return None if value is None else count(value)


_STATISTICS: dict[str, Any] = {
    "elements": count,
    "zero": share,
    "subnormal": share,
    "near_max": share,
    "amax": number,
    "lift": number,
    "nonfinite": count,
    "dtype": text,
    "rms": number,
    "top": number,
    "update": number,
    "unchanged": share,
    "below_eps": share,
    "alike": count,
    "gradient": text,
    "type": text,
    "exponents": _exponents,
}
_DETAIL: dict[str, Any] = {
    "cause": text,
    "scale": number,
    "next_scale": number,
    "culprits": texts,
    "micro_batch": _optional_count,
    "key": text,
    "code": text,
    "text": text,
    "module": text,
    "found": text,
    "where": text,
    "time": text,
}
_DETAIL_OF: dict[str, dict[str, Any]] = {
    "optimizer": {"who": text, "type": text, "groups": lambda value: [_group(g) for g in value]},
    "trained": {
        "left_out": texts,
        "left_out_count": count,
        "shared": texts,
        "not_called": texts,
        "trained": count,
    },
}
_HEADER: dict[str, Any] = {"rule": text, "framework": text, "parameters": _sizes}


def by_name(value: Any) -> dict[str, dict[str, Any]]:
    """Statistics by name of parameter or module."""
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise ValueError("not statistics by name")
    return {text(name): statistics(each) for name, each in value.items()}


def calls(value: Any) -> list[tuple[str, str, str, str, int]]:
    """The calls of one window: name, place, who, fact, times.

    >>> calls([["step", "train.py:12", "SGD", "", 1]])
    [('step', 'train.py:12', 'SGD', '', 1)]
    """
    if not isinstance(value, list) or len(value) > MOST_CALLS:
        raise ValueError("not an order of calls")
    return [(text(a), text(b), text(c), _fact(a, d), count(n)) for a, b, c, d, n in value]


def _fact(name: str, value: Any) -> str:
    if name.startswith("clip_grad_") and value:
        float(value)  # the limit
    return text(value)


def detail(what: str, value: Any) -> dict[str, Any]:
    """What an event of a kind has besides its step and its kind."""
    if not isinstance(value, dict):
        raise ValueError("not details")
    known = _DETAIL | _DETAIL_OF[what] if what in _DETAIL_OF else _DETAIL
    return {text(name): known.get(name, plain)(each) for name, each in value.items()}


def _group(value: Any) -> dict[str, Any]:
    """The settings of an optimizer's group."""
    if not isinstance(value, dict):
        raise ValueError("not settings")
    return {**plain(value), "dtypes": texts(value.get("dtypes", []))}


def header(value: dict[str, Any]) -> dict[str, Any]:
    """A run's header."""
    return {text(name): _HEADER.get(name, plain)(each) for name, each in value.items()}

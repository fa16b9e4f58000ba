"""Saved states in which one value is replaced by something that does not belong there."""

import copy
import math

import numpy as np

LARGE = 10**5000
VALUES = (
    None,
    True,
    -1,
    0,
    0.5,
    3.0,
    2**31,
    2**63,
    LARGE,
    -LARGE,
    1.7e308,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "text",
    "65536",
    "\x1b[31mred",
    "\ud800",
    "[" * 100_000,
    b"bytes",
    [],
    [1, [2]],
    {},
    {"schema": 99},
    {1: {"a": None}},
    1j,
    object(),
    np.zeros(3),
    np.float32(math.nan),
    np.array("text"),
    lambda: None,
)


def places(state, path=()):
    """The path of every value inside nested dicts and lists."""
    yield path
    inner = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in inner:
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def damaged(state, values=VALUES):
    """(what was done, the state) for every place, with every value instead, and without it."""
    for path in places(state):
        for value in values:
            if not path:
                yield f"all: {type(value).__name__}", value
                continue
            made = copy.deepcopy(state)
            inner = made
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            yield f"{path}: {type(value).__name__} {_short(value)}", made
        if path and isinstance(path[-1], str):
            made = copy.deepcopy(state)
            inner = made
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]]
            yield f"{path}: left out", made


def _short(value):
    return str(value)[:20] if isinstance(value, (str, float, bool)) else ""

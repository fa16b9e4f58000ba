"""Remembers which gradients have lost their scale already, as long as they live."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class _Mark(NamedTuple):
    leaf: weakref.ref[Any]
    norm: Callable[[], Any]
    together: int
    """How many leaves have this norm."""


_marks: dict[int, _Mark] = {}


def _forget(key: int, gone: Any) -> None:
    _marks.pop(key, None)


def _nothing() -> None:
    return None


def mark(grads: Any, norm: Any = None) -> Any:
    """Notes each leaf, and the norm of them all. A copy, or what leaves a `jit`, is a stranger."""
    leaves = jax.tree.leaves(grads)
    held: Callable[[], Any] = _nothing if norm is None else weakref.ref(norm)
    for leaf in leaves:
        key = id(leaf)
        alive = weakref.ref(leaf, functools.partial(_forget, key))
        _marks[key] = _Mark(alive, held, len(leaves))
    return grads


def _found(grads: Any) -> list[_Mark | None]:
    marks = []
    for leaf in jax.tree.leaves(grads):
        noted = _marks.get(id(leaf))
        marks.append(noted if noted is not None and noted.leaf() is leaf else None)
    return marks


def marked(grads: Any) -> bool:
    """Was any of these returned by `value_and_grad`?"""
    return any(mark is not None for mark in _found(grads))


def is_norm_of(norm: Any, grads: Any) -> bool:
    """Are these all the gradients that `norm` was taken of, as they were?"""
    marks = _found(grads)
    return all(m is not None and m.norm() is norm and m.together == len(marks) for m in marks)

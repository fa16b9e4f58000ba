"""Route A's other half: `apply`; and which gradients have lost their scale, with what norm."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import checked_max_norm, clip_coefficient
from ..errors import MisuseError
from .finite_checking import leaves_of, look
from .masters import MasterState, rounded
from .scaler import Result, unscaled
from .selection import gated


def apply(
    optimizer: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    result: Result | Sequence[Result],
    *,
    max_norm: float | None = None,
    **extra: Any,
) -> tuple[Any, Any]:
    """`optimizer.update` and `optax.apply_updates` where the step is sound; else nothing moves.

        params, opt_state = apply(optimizer, grads, opt_state, params, result)

    `max_norm` clips the gradients as they are given here. Several results (of losses whose
    gradients were added up) must all be sound. `extra` goes to `optimizer.update`.

    >>> from gradlift.jax import Scaler, value_and_grad
    >>> params, opt = jnp.ones(2), optax.sgd(0.5)
    >>> loss, grads, scaler, result = value_and_grad(lambda w: w.sum())(Scaler(), params)
    >>> params, state = apply(opt, grads, opt.init(params), params, result)
    >>> params.tolist()
    [0.5, 0.5]
    """
    results = [result] if isinstance(result, Result) else list(result)
    if not results or not all(isinstance(r, Result) for r in results):
        raise MisuseError("apply() wants the result of value_and_grad, or a list of results")
    leaves_of(grads)  # refuses what is no gradient, by name
    if max_norm is not None:
        most = checked_norm(max_norm)
        grads = unscaled(grads, clip_coefficient(norm_of(grads, results), most, jnp))
    stepped = functools.reduce(jnp.logical_and, [r.stepped for r in results])

    def step() -> tuple[Any, Any]:
        update = optax.with_extra_args_support(optimizer).update
        updates, moved = update(grads, opt_state, params, **extra)
        return _moved(params, updates, moved), moved

    return gated(stepped, step, (params, opt_state))


def _moved(params: Any, updates: Any, opt_state: Any) -> Any:
    """The updated parameters; masters are rounded into them rather than met by an addition."""
    chained = type(opt_state) is tuple and opt_state
    last = opt_state[-1] if chained else opt_state  # what follows masters may change the updates
    if isinstance(last, MasterState):
        return jax.tree.map(rounded, last.masters, params)
    return optax.apply_updates(params, updates)


def checked_norm(max_norm: Any) -> Any:
    """`max_norm`, if gradients can be clipped at it; what is traced cannot be checked."""
    return max_norm if isinstance(max_norm, jax.core.Tracer) else checked_max_norm(max_norm)


def norm_of(grads: Any, results: Sequence[Result]) -> Any:
    """The norm that was taken when they were checked, if these are the same gradients still."""
    if len(results) == 1 and _is_norm_of(results[0].grad_norm, grads):
        return results[0].grad_norm
    leaves = leaves_of(grads)
    return look(leaves, 1.0, amax=False).norm if leaves else jnp.float32(0)


# Gradients that `value_and_grad` returned are marked as long as they live.


class _Mark(NamedTuple):
    leaf: weakref.ref[Any]
    norm: Callable[[], Any]
    together: int
    """How many leaves have this norm."""


_marks: dict[int, _Mark] = {}


def mark(grads: Any, norm: Any = None) -> Any:
    """Marks each leaf as unscaled, with the norm of them all. A copy has no mark, nor has what
    leaves a `jit`."""
    leaves = jax.tree.leaves(grads)
    held: Callable[[], Any] = _no_norm if norm is None else weakref.ref(norm)
    for leaf in leaves:
        key = id(leaf)
        alive = weakref.ref(leaf, functools.partial(_forget, key))
        _marks[key] = _Mark(alive, held, len(leaves))
    return grads


def marked(grads: Any) -> bool:
    """Was any of these returned by `value_and_grad`?"""
    return any(mark is not None for mark in _found(grads))


def _is_norm_of(norm: Any, grads: Any) -> bool:
    """Are these all the gradients that `norm` was taken of, as they were?"""
    marks = _found(grads)
    return all(m is not None and m.norm() is norm and m.together == len(marks) for m in marks)


def _found(grads: Any) -> list[_Mark | None]:
    marks = []
    for leaf in jax.tree.leaves(grads):
        noted = _marks.get(id(leaf))
        marks.append(noted if noted is not None and noted.leaf() is leaf else None)
    return marks


def _forget(key: int, gone: Any) -> None:
    _marks.pop(key, None)


def _no_norm() -> None:
    return None

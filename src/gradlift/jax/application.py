"""Route A: `apply`, and the mark on gradients that have been looked at, with their norm."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import checked_max_norm, clip_coefficient
from ..errors import MisuseError, warn
from ..rules import Off
from .finite_checking import Look, leaves_of, look, named_culprits, named_leaves
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

    Gradients that are not those of `value_and_grad` any more (clipped, added up, edited) are read
    once more, and nothing moves if one is not finite; the result, made before, does not say so.

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
    leaves = leaves_of(grads)  # refuses what is no gradient, by name
    stepped = functools.reduce(jnp.logical_and, [r.stepped for r in results])
    norm: Any = jnp.float32(0)
    if len(results) == 1 and _is_norm_of(results[0].grad_norm, grads):
        norm = results[0].grad_norm
    elif leaves and (max_norm is not None or not all(isinstance(r.rule, Off) for r in results)):
        found = look(leaves, 1.0, amax=False)  # added up, clipped, edited: read once more
        norm = found.norm
        if not all(isinstance(r.rule, Off) for r in results):
            _warn_of_change(stepped, found, grads)
            stepped = stepped & ~found.nonfinite
    if max_norm is not None:
        grads = unscaled(grads, clip_coefficient(norm, checked_norm(max_norm), jnp))

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


def _warn_of_change(stepped: Any, found: Look, grads: Any) -> None:
    """Outside of `jit` it can be said that these gradients were sound before they were changed."""
    if any(isinstance(x, jax.core.Tracer) for x in (stepped, found.nonfinite)):
        return
    if bool(stepped & found.nonfinite):
        names = [name for name, _ in named_leaves(grads)]
        first = named_culprits(names, jax.device_get(found.kinds))[0]
        warn(
            f"the gradient of {first} was changed after it had been checked and is now "
            f"{first.kind}: nothing was applied, although the result says so"
        )


# Gradients that `value_and_grad` returned are marked as long as they live.


class _Mark(NamedTuple):
    leaf: weakref.ref[Any]
    norm: Callable[[], Any]
    together: int
    """How many leaves have this norm."""


_marks: dict[int, _Mark] = {}


def mark(grads: Any, norm: Any = None) -> Any:
    """Marks each leaf as looked at, with the norm of them all. A copy has no mark, nor has what
    leaves a `jit`."""
    leaves = jax.tree.leaves(grads)
    held: Callable[[], Any] = _no_norm if norm is None else weakref.ref(norm)
    for leaf in leaves:
        key = id(leaf)
        alive = weakref.ref(leaf, functools.partial(_forget, key))
        _marks[key] = _Mark(alive, held, len(leaves))
    return grads


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

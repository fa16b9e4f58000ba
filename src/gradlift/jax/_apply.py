"""Route A's other half: `apply`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..errors import MisuseError, SettingsError
from ._inspect import leaves_of, look
from ._mark import is_norm_of
from ._master import MasterState
from ._scaler import Result, unscaled
from ._select import gated


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
        grads = unscaled(grads, coefficient(checked_norm(max_norm), norm_of(grads, results)))
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
        return jax.tree.map(lambda m, p: m.astype(p.dtype), last.masters, params)
    return optax.apply_updates(params, updates)


def checked_norm(max_norm: Any) -> Any:
    if isinstance(max_norm, (int, float)) and not max_norm > 0:
        raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
    return max_norm


def coefficient(max_norm: Any, norm: Any) -> Any:
    """What the gradients are multiplied with to be no longer than `max_norm`."""
    return jnp.minimum(1.0, max_norm / (norm + 1e-6))


def norm_of(grads: Any, results: Sequence[Result]) -> Any:
    """The norm that was taken when they were checked, if these are the same gradients still."""
    if len(results) == 1 and is_norm_of(results[0].grad_norm, grads):
        return results[0].grad_norm
    leaves = leaves_of(grads)
    return look(leaves, 1.0, amax=False).norm if leaves else jnp.float32(0)

"""The same batch at another scale: the core's retries inside `lax.while_loop`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import next_try, worth_retrying
from ..errors import MisuseError
from ..reading import Reading
from ..rules import ScaleState
from .finite_checking import type_of
from .scaler import Scaler, advanced


def retried(attempt: Callable[[Scaler], Any], scaler: Scaler, retries: int) -> tuple[Any, Any]:
    """How often it was tried again, and the first attempt that is sound, or the last.

    After each the rule moves, as after any overflow.
    """
    first, reading, *rest, grads = attempt(scaler)
    if reading.checked is False:  # no gradients: nothing to be had from another scale
        return 0, (first, reading, *rest, grads)
    still, pack = _packed(grads)

    def carry_of(found: Any) -> Any:
        scaler, reading, *rest, grads = found
        seen = (reading.nonfinite, reading.amax, reading.loss_nonfinite, reading.norm)
        return scaler, seen, tuple(rest), still(grads)

    def answered(tries: Any, scaler: Scaler, seen: Any) -> tuple[ScaleState, Any, Any]:
        """The rule's answer; is the batch worth another try, at a lower or a far larger scale?"""
        reading = _reading(seen)
        after = advanced(scaler, reading).state
        left = retries - tries
        return after, *worth_retrying(scaler.rule, scaler.state, after, reading, left, jnp)

    def again(carry: Any) -> Any:
        tries, _, (scaler, seen, *_) = carry
        _, lower, larger = answered(tries, scaler, seen)
        return jnp.logical_or(lower, larger)

    def body(carry: Any) -> Any:
        tries, clean_at, (scaler, seen, *_) = carry
        after, _, larger = answered(tries, scaler, seen)
        state, clean_at = next_try(scaler.state, after, larger, clean_at, retries - tries, jnp)
        return tries + 1, clean_at, carry_of(attempt(dataclasses.replace(scaler, state=state)))

    none = jnp.zeros_like(first.state.scale)  # the scale at which this batch was clean, if any
    start = jnp.int32(0), none, carry_of((first, reading, *rest, grads))
    tries, _, (scaler, seen, held, grads) = lax.while_loop(again, body, start)
    return tries, (scaler, _reading(seen), *held, pack(grads))


def _reading(seen: Any) -> Reading:
    nonfinite, amax, blamed, norm = seen
    return Reading(nonfinite, amax, blamed, norm=norm)


def _packed(grads: Any) -> tuple[Callable[[Any], list[Any]], Callable[[list[Any]], Any]]:
    """Gradients without their float0 leaves, which no loop can carry, and back."""
    leaves, tree = jax.tree.flatten(grads)
    nothing = [x if type_of(x) == jax.dtypes.float0 else None for x in leaves]

    def still(grads: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(grads) if type_of(x) != jax.dtypes.float0]

    def pack(real: list[Any]) -> Any:
        parts = iter(real)
        return jax.tree.unflatten(tree, [next(parts) if x is None else x for x in nothing])

    return still, pack


@jax.custom_jvp
def _constant(leaves: list[Any]) -> list[Any]:
    return leaves


@_constant.defjvp
def _no_derivative(primals: Any, tangents: Any) -> Any:
    raise MisuseError(
        "value_and_grad(..., retries=...) computes a batch in a loop of unknown length, which "
        "cannot be differentiated: use retries=0 inside jax.grad, jax.jvp and the like"
    )


def undifferentiated(tree: Any) -> Any:
    """The same tree; differentiating through it raises an error that says why."""
    leaves, structure = jax.tree.flatten(tree)
    real = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    for i, x in zip(real, _constant([leaves[i] for i in real]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)

"""The same batch at another scale: `gradlift.verdict.decide`'s RETRY inside `lax.while_loop`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import MisuseError
from ..reading import Reading
from ._inspect import type_of
from ._scaler import Scaler, advanced


def retried(attempt: Callable[[Scaler], Any], scaler: Scaler, retries: int) -> tuple[Any, Any]:
    """How often it was tried again, and the first attempt that is sound, or the last.

    After each the rule moves, as after any overflow.
    """
    first, reading, loss, aux, grads = attempt(scaler)
    if reading.checked is False:  # no gradients: nothing to be had from another scale
        return 0, (first, reading, loss, aux, grads)
    still, pack = _packed(grads)

    def carried(found: Any) -> Any:
        scaler, reading, loss, aux, grads = found
        seen = (reading.nonfinite, reading.amax, reading.loss_nonfinite, reading.norm)
        return scaler, seen, loss, aux, still(grads)

    def again(carry: Any) -> Any:
        tries, _, (scaler, seen, *_) = carry
        lower, far = _worth_it(scaler, _reading(seen))
        return (lower & (tries < retries)) | (far & (tries < retries - 1))

    def body(carry: Any) -> Any:
        tries, sound, (scaler, seen, *_) = carry
        _, far = _worth_it(scaler, _reading(seen))
        after = advanced(scaler, _reading(seen)).state
        sound = jnp.where(far, scaler.state.scale, sound)
        last = ~far & (sound > 0) & (tries == retries - 1)  # it must not be lost
        scale = jnp.where(last, sound, after.scale)
        after = after._replace(scale=scale, skips=scaler.state.skips)  # a retry is no skip
        return tries + 1, sound, carried(attempt(dataclasses.replace(scaler, state=after)))

    none = jnp.zeros_like(first.state.scale)  # the scale at which this batch was clean, if any
    start = jnp.int32(0), none, carried((first, reading, loss, aux, grads))
    tries, _, (scaler, seen, loss, aux, grads) = lax.while_loop(again, body, start)
    return tries, (scaler, _reading(seen), loss, aux, pack(grads))


def _reading(seen: Any) -> Reading:
    nonfinite, amax, dead, norm = seen
    return Reading(nonfinite, amax, dead, norm=norm)


def _worth_it(scaler: Scaler, reading: Reading) -> tuple[Any, Any]:
    """Does the rule answer an overflow with a lower scale, or want to recompute a clean batch?"""
    before, after = scaler.state, advanced(scaler, reading).state
    lower = reading.nonfinite & (after.scale < before.scale)
    far = ~reading.nonfinite & jnp.asarray(scaler.rule.recompute(before, after), bool)
    alive = ~reading.loss_nonfinite
    return alive & lower, alive & far


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
    """The same tree; whoever differentiates through it is told that this cannot be done."""
    leaves, structure = jax.tree.flatten(tree)
    real = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    for i, x in zip(real, _constant([leaves[i] for i in real]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)

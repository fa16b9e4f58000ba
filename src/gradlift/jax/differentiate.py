"""Route A: `value_and_grad`, with the scaler passed in and out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import MisuseError, SettingsError
from ..rules import Off
from . import devices as _axis
from .accumulation import accumulated
from .application import mark
from .finite_checking import name_of
from .retrying import retried, undifferentiated
from .scaler import (
    Scaler,
    checked_loss,
    finish,
    first_bad_loss,
    parameters_of,
    read,
    scaled_loss,
    unscaled,
)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    retries: int = 0,
    accumulate: bool = False,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss that is scaled on the way: gradients come back true, float32.

        loss, grads, scaler, result = value_and_grad(fun)(scaler, params, batch)

    | | |
    |---|---|
    | `has_aux` | `fun` gives `(loss, aux)`, and so does the first of the four |
    | `retries` | after an overflow the same batch is computed again at the next scale, up to so \
many times, in a `lax.while_loop`; "auto" wants `Scaler("auto", retries=True)` |
    | `accumulate` | arrays among the other arguments hold micro-batches along their first axis; \
they are scanned at one scale, loss and gradients are means |
    | `axis_name` | in `shard_map` and `pmap`: loss and gradients are averaged along it, and all \
devices decide alike |

    >>> loss, grads, scaler, result = value_and_grad(lambda w, x: (w * x).sum())(
    ...     Scaler("auto"), jnp.ones(2), jnp.array([3.0, 4.0]))
    >>> grads.tolist(), float(result.grad_norm)
    ([3.0, 4.0], 5.0)
    """
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise SettingsError(f"retries is {retries!r}, expected a whole number, 0 or more")

    @functools.wraps(fun)
    def wrapped(scaler: Scaler, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(scaler, Scaler):
            raise MisuseError(
                f"the first argument is the scaler, this is {type(scaler).__name__}: call "
                "value_and_grad(fun)(scaler, params, ...)"
            )
        off = isinstance(scaler.rule, Off)
        again = bool(retries) and not off
        if again:
            scaler, args, kwargs = undifferentiated((scaler, args, kwargs))
        once = functools.partial(_once, fun, argnums, has_aux)
        if accumulate:
            once = functools.partial(accumulated, once, argnums)

        loss_type: Any = jnp.float32

        def attempt(scaler: Scaler) -> Any:
            """The scaler at the scale used; what it showed; loss, aux and scaled gradients."""
            nonlocal loss_type
            losses, aux, local, loss_type = once(scaler, args, kwargs)
            scaler = scaler if off else scaler.capped(loss_type)
            loss = losses.mean() if accumulate else losses
            grads, shown = local, None
            if axis_name is not None:
                grads, shown = _axis.averaged(local, axis_name, loss), local
                loss = _axis.mean(loss, axis_name)
            reading, kinds = read(scaler, grads, losses, axis_name, shown)
            return scaler, reading, kinds, first_bad_loss(losses, axis_name), loss, aux, grads

        tries: Any = 0
        if again:
            tries, found = retried(attempt, scaler, retries)
        else:
            found = attempt(scaler)
        scaler, reading, kinds, bad_loss, loss, aux, grads = found
        after, result = finish(
            scaler,
            reading,
            kinds,
            parameters_of(grads),
            loss,
            loss_type=loss_type,
            retries=tries,
            bad_loss=bad_loss,
        )
        if not off:
            grads = unscaled(grads, 1 / scaler.state.scale)
        if again:
            loss, aux, grads = undifferentiated((loss, aux, grads))
        grads = mark(grads, None if off else result.grad_norm)
        return ((loss, aux) if has_aux else loss), grads, after, result

    return wrapped


def _once(
    fun: Any, argnums: Any, has_aux: bool, scaler: Scaler, args: Any, kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """Loss, aux, scaled gradients, and the loss's type."""
    for place in [argnums] if isinstance(argnums, int) else argnums:
        _check_differentiable(args[place])

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = fun(*args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise MisuseError(
                f"has_aux=True wants a function that returns (loss, aux), this one returned "
                f"{type(out).__name__}"
            )
        loss, aux = out if has_aux else (out, None)
        loss = checked_loss(loss)
        return scaled_loss(scaler, loss), (loss, aux)

    (_, (loss, aux)), grads = jax.value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
    return loss, aux, grads, loss.dtype


def _check_differentiable(tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise MisuseError(
                f"the parameter at {name_of(path)} is {leaf.dtype}, which has no gradient: keep it "
                "out of what is differentiated (argnums, equinox.partition)"
            )

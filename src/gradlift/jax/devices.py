"""Devices that each hold a part of the batch: averages along a mapped axis, and one decision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import MisuseError


def _names(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def varying(x: Any) -> frozenset[Any]:
    """Axes along which JAX knows `x` to differ between devices; empty if it does not keep track.

    `x` is an array or the shape of one.
    """
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    axes = getattr(kind, "manual_axis_type", None)
    return frozenset(axes.varying if axes is not None else getattr(kind, "vma", None) or ())


def zeros_like(shape: Any) -> Any:
    """Zeros that differ, on paper, along the axes that `shape` does: a scan's carry has to."""
    zeros, names = jnp.zeros(shape.shape, shape.dtype), tuple(varying(shape))
    return lax.pcast(zeros, names, to="varying") if names else zeros


def _tracked(names: tuple[Any, ...]) -> bool:
    """`shard_map` shows what differs between devices (`check_vma`), `pmap` does not."""
    return all(name in varying(lax.axis_index(name)) for name in names)


def averaged(grads: Any, axis_name: Any, loss: Any = None) -> Any:
    """The gradients of the loss's average along the axis, in float32 at least.

    Where `shard_map` keeps track, gradients of parameters that all devices share have been added
    up by JAX already: then only the average over the losses is missing.
    """
    names = _names(axis_name)
    tracked = _tracked(names)
    over = names
    if tracked and loss is not None:
        over = tuple(n for n in names if n in varying(loss))

    def one(g: Any) -> Any:
        if g.dtype == jax.dtypes.float0:
            return g
        g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        to_add = tuple(n for n in names if n in varying(g)) if tracked else names
        if loss is None:
            return lax.pmean(g, to_add) if to_add else g
        if tracked and to_add:
            raise MisuseError(
                f"a parameter of shape {g.shape} is split along {to_add}: value_and_grad(..., "
                "axis_name=...) averages gradients of parameters that all devices share. Use jit "
                "with sharded arrays for split ones, without axis_name"
            )
        g = lax.psum(g, to_add) if to_add else g
        return g / lax.psum(1, over) if over else g

    return jax.tree.map(one, grads)


def mean(x: Any, axis_name: Any) -> Any:
    """The average of `x`, where devices may differ in it."""
    names = _names(axis_name)
    differ = tuple(n for n in names if n in varying(x)) if _tracked(names) else names
    return lax.pmean(x, differ) if differ else x


def largest(x: Any, axis_name: Any) -> Any:
    """The maximum along the axis; NaN must not enter."""
    names = _names(axis_name)
    differ = tuple(n for n in names if n in varying(x)) if _tracked(names) else names
    return lax.pmax(x, differ) if differ else x

"""One look at the scaled gradients, inside `jit`: finite? how large? which norm?

Written leaf by leaf with one sum at the end, so that what XLA compiles grows with the number of
leaves and not with its square.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import MisuseError

# Times DOWN no square of a float32 overflows, nor does the sum of 2^40 of them; times UP the
# squares of numbers whose plain sum of squares is below TINY are normal again.
_DOWN, _UP, _TINY = 2.0**-84, 2.0**84, 1e-20


class Look(NamedTuple):
    """What the scaled gradients showed, in 0-d arrays."""

    nonfinite: Any
    amax: Any
    """Largest |g| as scaled, inf if one is not finite; NaN where it was not taken."""
    norm: Any
    """Norm of the true gradients; NaN if one is not finite."""


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the root"


def type_of(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def leaves_of(grads: Any) -> list[Any]:
    """The gradients to look at. None and float0 (no gradient) are left out, as equinox makes them.

    >>> [x.shape for x in leaves_of({"a": jnp.ones(2), "b": None})]
    [(2,)]
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise MisuseError(
                f"the gradient at {name_of(path)} is a {type(leaf).__name__}, expected an array"
            )
        dtype = type_of(leaf)
        if dtype == jax.dtypes.float0:
            continue
        if not jnp.issubdtype(dtype, jnp.floating):
            raise MisuseError(
                f"the gradient at {name_of(path)} is {dtype}, expected real floating-point "
                "numbers: differentiate with respect to floating-point leaves only (argnums of "
                "value_and_grad, equinox.partition)"
            )
        if jnp.size(leaf):
            found.append(jnp.asarray(leaf))
    return found


def look(leaves: list[Any], inverse: Any, *, amax: bool) -> Look:
    """Sum of squares and, if wanted, amax. What looks odd is confirmed exactly.

    `inverse` is 1/scale: a gradient that leaves float32 on the way to its use is not finite. The
    finite check is never a maximum: XLA's on the CPU loses NaN.

    >>> seen = look([jnp.array([3.0, -4.0], jnp.float16)], jnp.float32(0.5), amax=True)
    >>> bool(seen.nonfinite), float(seen.amax), float(seen.norm)
    (False, 4.0, 2.5)
    """
    return _look(leaves, jnp.asarray(inverse, jnp.float32), amax)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _look(leaves: list[Any], inverse: Any, amax: bool) -> Look:
    found = lax.platform_dependent(leaves, inverse, cpu=_confirmed, default=_side_by_side)
    nonfinite, norm = found
    top = jnp.where(nonfinite, jnp.inf, largest(leaves)) if amax else jnp.float32(jnp.nan)
    return Look(nonfinite, top, jnp.where(nonfinite, jnp.nan, norm))


def largest(leaves: list[Any]) -> Any:
    """max |g|; NaN may be lost."""
    return jnp.stack([jnp.max(jnp.abs(g)).astype(jnp.float32) for g in leaves]).max()


def _sum_of_squares(leaves: list[Any], *factors: Any) -> Any:
    def one(g: Any) -> Any:
        g = g.astype(jnp.float32)
        for factor in factors:  # one after the other: their product may be out of range
            g = g * factor
        return jnp.sum(jnp.square(g))

    return jnp.stack([one(g) for g in leaves]).sum()


def _confirmed(leaves: list[Any], inverse: Any) -> tuple[Any, Any]:
    """One read, and a second one if the first looks odd: is one not finite, and the true norm."""
    squares = _sum_of_squares(leaves)
    blown = jnp.maximum(inverse, 1)
    large = ~(squares * blown * blown < jnp.inf)

    def again(_: Any) -> tuple[Any, Any]:
        first, then = jnp.where(large, blown, 1), jnp.where(large, _DOWN, _UP)
        total = _sum_of_squares(leaves, first, then)
        norm = jnp.where(large, _large(total, inverse), _small(total, inverse))
        return ~jnp.isfinite(total), norm

    def clear(_: Any) -> tuple[Any, Any]:
        # As a comparison, so that under shard_map both branches vary along the same axes.
        return ~(squares < jnp.inf), jnp.sqrt(squares) * inverse

    return lax.cond(large | (squares < _TINY), again, clear, None)


def _side_by_side(leaves: list[Any], inverse: Any) -> tuple[Any, Any]:
    """The same where a branch would wait for the device: three sums at once, no second look."""
    squares = _sum_of_squares(leaves)
    blown = jnp.maximum(inverse, 1)
    high, low = _sum_of_squares(leaves, blown, _DOWN), _sum_of_squares(leaves, _UP)
    large = ~(squares * blown * blown < jnp.inf)
    norm = jnp.where(squares < _TINY, _small(low, inverse), jnp.sqrt(squares) * inverse)
    return ~jnp.isfinite(high), jnp.where(large, _large(high, inverse), norm)


# In this order nothing leaves float32 on the way, unless the norm itself does.
def _large(total: Any, inverse: Any) -> Any:
    return jnp.sqrt(total) * (jnp.minimum(inverse, 1) / _DOWN)


def _small(total: Any, inverse: Any) -> Any:
    return jnp.sqrt(total) / _UP * inverse


def culprits(grads: Any) -> tuple[str, ...]:
    """Key-paths of the leaves that are not finite; to be called outside `jit`.

    >>> culprits({"a": jnp.ones(2), "b": [jnp.array(jnp.nan)]})
    ("['b'][0]",)
    """
    named = [
        (path, jnp.isfinite(leaf).all())
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    flags = jax.device_get([finite for _, finite in named])
    return tuple(name_of(path) for (path, _), finite in zip(named, flags) if not finite)

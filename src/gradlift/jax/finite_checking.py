"""One look at the scaled gradients, inside `jit`: finite? how large? which norm?

Written leaf by leaf with one sum at the end, so that what XLA compiles grows with the number of
leaves and not with its square.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import Culprit
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
    kinds: Any
    """For each leaf 0, or 1 if it holds inf, or 2 if it holds NaN."""


KINDS = ("", "inf", "nan")


def name_of(path: Any) -> str:
    """A place in a tree, as an error message names it."""
    return jax.tree_util.keystr(path) or "the root"


def type_of(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def named_leaves(grads: Any) -> list[tuple[str, Any]]:
    """The real floating-point leaves that are not empty, each with its dotted path.

    None and float0 (no gradient) are left out, as equinox makes them.

    >>> [(name, x.shape) for name, x in named_leaves({"a": [jnp.ones(2)], "b": None})]
    [('a.0', (2,))]
    """
    return [
        (jax.tree_util.keystr(path, simple=True, separator=".") or "gradient", jnp.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if jnp.issubdtype(type_of(leaf), jnp.floating) and jnp.size(leaf)
    ]


def leaves_of(grads: Any) -> list[Any]:
    """The gradients to look at; a leaf that is no gradient is refused by name.

    >>> [x.shape for x in leaves_of({"a": jnp.ones(2), "b": None})]
    [(2,)]
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise MisuseError(
                f"the gradient at {name_of(path)} is a {type(leaf).__name__}, expected an array"
            )
        dtype = type_of(leaf)
        if dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jnp.floating):
            raise MisuseError(
                f"the gradient at {name_of(path)} is {dtype}, expected real floating-point "
                "numbers: differentiate with respect to floating-point leaves only (argnums of "
                "value_and_grad, equinox.partition)"
            )
    return [leaf for _, leaf in named_leaves(grads)]


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
    kinds, norm = found
    nonfinite = (kinds > 0).any()
    top = jnp.where(nonfinite, jnp.inf, largest(leaves)) if amax else jnp.float32(jnp.nan)
    return Look(nonfinite, top, jnp.where(nonfinite, jnp.nan, norm), kinds)


def largest(leaves: list[Any]) -> Any:
    """max |g|; NaN may be lost."""
    return jnp.stack([jnp.max(jnp.abs(g)).astype(jnp.float32) for g in leaves]).max()


def _squares(leaves: list[Any], *factors: Any) -> Any:
    """Each leaf's sum of squares."""

    def one(g: Any) -> Any:
        g = g.astype(jnp.float32)
        for factor in factors:  # one after the other: their product may be out of range
            g = g * factor
        return jnp.sum(jnp.square(g))

    return jnp.stack([one(g) for g in leaves])


def _kinds(squares: Any) -> Any:
    """What each leaf holds, by its sum of squares: NaN comes from NaN alone."""
    return jnp.isinf(squares).astype(jnp.int8) + 2 * jnp.isnan(squares).astype(jnp.int8)


def _confirmed(leaves: list[Any], inverse: Any) -> tuple[Any, Any]:
    """One read, and a second one if the first looks odd: each leaf's kind, and the true norm."""
    parts = _squares(leaves)
    squares = parts.sum()
    blown = jnp.maximum(inverse, 1)
    large = ~(squares * blown * blown < jnp.inf)

    def again(_: Any) -> tuple[Any, Any]:
        first, then = jnp.where(large, blown, 1), jnp.where(large, _DOWN, _UP)
        # Known while compiling, they would be taken out of the sum: 2^-168 x inf.
        first, then = lax.optimization_barrier((first, then))
        parts = _squares(leaves, first, then)
        total = parts.sum()
        return _kinds(parts), jnp.where(large, _large(total, inverse), _small(total, inverse))

    def clear(_: Any) -> tuple[Any, Any]:
        # All 0, but computed: under shard_map both branches must vary along the same axes.
        return _kinds(parts), jnp.sqrt(squares) * inverse

    return lax.cond(large | (squares < _TINY), again, clear, None)


def _side_by_side(leaves: list[Any], inverse: Any) -> tuple[Any, Any]:
    """The same where a branch would wait for the device: three sums at once, no second look."""
    squares = _squares(leaves).sum()
    blown = jnp.maximum(inverse, 1)
    high, low = _squares(leaves, blown, _DOWN), _squares(leaves, _UP).sum()
    large = ~(squares * blown * blown < jnp.inf)
    norm = jnp.where(squares < _TINY, _small(low, inverse), jnp.sqrt(squares) * inverse)
    return _kinds(high), jnp.where(large, _large(high.sum(), inverse), norm)


# In this order nothing leaves float32 on the way, unless the norm itself does.
def _large(total: Any, inverse: Any) -> Any:
    return jnp.sqrt(total) * (jnp.minimum(inverse, 1) / _DOWN)


def _small(total: Any, inverse: Any) -> Any:
    return jnp.sqrt(total) / _UP * inverse


def named_culprits(names: Sequence[str], kinds: Any) -> tuple[Culprit, ...]:
    """The leaves that are not finite, the last one (backward made it first) in front."""
    bad = [Culprit(name, KINDS[kind]) for name, kind in zip(names, kinds, strict=True) if kind]
    return tuple(reversed(bad))


def culprits(grads: Any) -> tuple[Culprit, ...]:
    """Dotted paths of the leaves that are not finite, each with its kind, the last in front; to be
    called outside `jit`. A result has them too: `result.culprits`.

    >>> found = culprits({"a": jnp.ones(2), "b": [jnp.array(jnp.nan)]})
    >>> found, found[0].kind
    (('b.0',), 'nan')
    """
    named = named_leaves(grads)
    if not named:
        return ()
    kinds = look([leaf for _, leaf in named], 1.0, amax=False).kinds
    return named_culprits([name for name, _ in named], jax.device_get(kinds))

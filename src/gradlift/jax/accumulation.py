"""Micro-batches: a scan at one scale, gradients averaged in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import MisuseError
from .devices import zeros_like
from .finite_checking import name_of
from .scaler import Scaler, unscaled


def accumulated(
    once: Callable[[Scaler, Any, Any], Any], argnums: Any, scaler: Scaler, args: Any, kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """`once` over the first axis of every array that is not differentiated; losses and aux are
    stacked.

    Numbers and arrays without axes are given to every micro-batch alike.
    """
    places = {n % len(args) for n in ([argnums] if isinstance(argnums, int) else argnums)}
    others = {i: a for i, a in enumerate(args) if i not in places}
    leaves, tree = jax.tree_util.tree_flatten_with_path((others, kwargs))
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        if _is_spread(leaf):
            sizes.setdefault(leaf.shape[0], name_of(path[1:]))
        elif hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise MisuseError(
                "accumulate=True would give one random key to all micro-batches: split it, "
                "jax.random.split(key, micro_batches)"
            )
    if len(sizes) != 1:
        found = ", ".join(f"{size} ({where})" for size, where in sizes.items()) or "none"
        raise MisuseError(
            "accumulate=True scans over the first axis of the batch, and finds different lengths: "
            f"{found}. Give every array the same number of micro-batches in front"
        )
    (count,) = sizes
    if count == 0:
        raise MisuseError("accumulate=True was given no micro-batch: the first axis is empty")
    spread = [leaf for _, leaf in leaves if _is_spread(leaf)]
    kinds: list[Any] = []

    def one(some: list[Any]) -> tuple[Any, Any, Any]:
        parts = iter(some)
        filled = [next(parts) if _is_spread(leaf) else leaf for _, leaf in leaves]
        rest, named = jax.tree.unflatten(tree, filled)
        every = tuple(rest.get(i, a) for i, a in enumerate(args))
        loss, aux, grads, kind = once(scaler, every, named)
        kinds.append(kind)
        return loss.astype(jnp.promote_types(kind, jnp.float32)), aux, unscaled(grads, 1.0)

    def body(total: Any, some: Any) -> tuple[Any, Any]:
        loss, aux, grads = one(some)
        # float0 (no gradient) cannot be carried: only its place is.
        return [a + g for a, g in zip(total, _real(grads), strict=True)], (loss, aux)

    shapes = jax.eval_shape(lambda: one([x[0] for x in spread])[2])
    zeros = [zeros_like(s) for s in _real(shapes)]
    totals, (losses, aux) = lax.scan(body, zeros, spread)
    means = iter([total / count for total in totals])
    grads = jax.tree.map(
        lambda s: _nothing(s.shape) if s.dtype == jax.dtypes.float0 else next(means), shapes
    )
    return losses, aux, grads, kinds[0]


def _is_spread(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.ndim(leaf) > 0


def _real(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def _nothing(shape: Any) -> Any:
    return np.zeros(shape, jax.dtypes.float0)

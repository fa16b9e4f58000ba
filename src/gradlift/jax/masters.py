"""Float32 masters for 16-bit parameters, as an optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..errors import MisuseError


class MasterState(NamedTuple):
    """The masters, and the inner optimizer's state over them.

    >>> master(optax.sgd(0.1)).init(jnp.ones(2, jnp.float16)).masters.dtype
    dtype('float32')
    """

    masters: Any
    inner: Any


def master(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Steps float32 copies of the parameters; updates bring the 16-bit ones to the rounded masters.

    `gradlift.jax.apply` rounds the masters into the parameters. Elsewhere the updates are the
    differences, which `optax.apply_updates` adds in float32 and rounds: exact, but for a weight
    that shrinks 2^13-fold in one step, which the next step then puts right.

    >>> params = jnp.ones(1, jnp.float16)
    >>> tx = master(optax.sgd(1e-4))
    >>> state = tx.init(params)
    >>> for _ in range(1000):                      # each step too small for float16 to notice
    ...     updates, state = tx.update(-jnp.ones(1), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.dtype, bool(jnp.abs(params[0] - 1.1) < 1e-3)
    (dtype('float16'), True)
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> MasterState:
        # Copies, of float32 leaves too: parameters and state may be donated together.
        masters = jax.tree.map(lambda p: jnp.array(_wide(p), copy=True), params)
        return MasterState(masters, inner.init(masters))

    def update(grads: Any, state: MasterState, params: Any = None, **more: Any) -> Any:
        if params is None:
            raise MisuseError(
                "master(optimizer).update needs the parameters it is to move: call "
                "update(grads, opt_state, params)"
            )
        wide = jax.tree.map(_wide, grads)
        steps, moved = inner.update(wide, state.inner, state.masters, **more)
        masters = optax.apply_updates(state.masters, steps)
        updates = jax.tree.map(
            lambda m, p: rounded(m, p).astype(m.dtype) - _wide(p), masters, params
        )
        return updates, MasterState(masters, moved)

    return optax.GradientTransformationExtraArgs(init, update)


def rounded(weights: Any, like: Any) -> Any:
    """A master in the dtype of its parameter; beyond that one's range its largest number.

    >>> rounded(jnp.float32([1e5, -1e5]), jnp.float16(0)).tolist()
    [65504.0, -65504.0]
    """
    if like.dtype not in (jnp.float16, jnp.bfloat16):
        return weights.astype(like.dtype)
    most = float(jnp.finfo(like.dtype).max)
    return jnp.clip(weights, -most, most).astype(like.dtype)


def _wide(x: Any) -> Any:
    narrow = hasattr(x, "dtype") and x.dtype in (jnp.float16, jnp.bfloat16)
    return x.astype(jnp.float32) if narrow else x

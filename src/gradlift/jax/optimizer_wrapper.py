"""Route B: an optax optimizer that carries the scaler in its own state.

The scale exists inside `scaled` only: it is put on where the backward pass begins and taken off
where it ends, so that nobody outside can use a wrong one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import HALF_LOSS_CEILING, Cause, checked_max_norm, clip_coefficient
from ..errors import MisuseError
from ..reading import Reading
from ..rules import Off, Rule
from . import devices as _axis
from .finite_checking import leaves_of, look, name_of, type_of
from .scaler import (
    Parameters,
    Result,
    Scaler,
    checked_loss,
    finish,
    first_bad_loss,
    no_kinds,
    parameters_of,
    read,
    unscaled,
)
from .selection import gated


class WrapState(NamedTuple):
    """The state of a wrapped optimizer.

    >>> state = wrap(optax.sgd(0.1), "static:8").init(jnp.ones(2))
    >>> float(state.scaler.state.scale), bool(state.result.stepped)
    (8.0, False)
    """

    inner: Any
    """The optimizer's own state."""
    scaler: Scaler
    result: Result
    """What the last update came to; before the first one, a step without gradients."""


def wrap(
    optimizer: optax.GradientTransformation,
    rule: Rule | str | float = "dynamic",
    *,
    max_norm: float | None = None,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` that checks gradients, clips, skips, and moves the scale of its next ones.

        loss, grads = jax.value_and_grad(scaled(loss_fn, opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)

    It goes around everything: `wrap(optax.chain(optax.clip(1.0), optax.adam(1e-3)))`. A transform
    in front of it could hide an overflow; `scaled` refuses such a state.

    `value=` is the loss, to tell a loss that is not finite from an overflow; of several losses
    whose gradients were added up, an array of all. After a skip the updates are -0.0, which
    `optax.apply_updates` adds without changing a bit. Gradients that differ along `axis_name` are
    averaged along it. Nothing is retried here, so "auto" is cautious.

    >>> tx = wrap(optax.sgd(0.5), "static:8")
    >>> params = jnp.ones(2)
    >>> state = tx.init(params)
    >>> loss, grads = jax.value_and_grad(scaled(jnp.sum, state))(params)
    >>> updates, state = tx.update(grads, state, params, value=loss)
    >>> grads.tolist(), updates.tolist(), bool(state.result.stepped)
    ([1.0, 1.0], [-0.5, -0.5], True)
    """
    start = Scaler(rule)  # type: ignore[arg-type]
    inner = optax.with_extra_args_support(optimizer)
    known = inspect.signature(inner.update).parameters.values()
    takes_value = any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in known)
    if max_norm is not None:
        max_norm = checked_max_norm(max_norm)

    def init(params: Any) -> WrapState:
        fresh, parameters = Scaler(start.rule), parameters_of(params)
        nothing = Reading(False, jnp.float32(0), checked=False)
        _, result = finish(fresh, nothing, no_kinds(parameters), parameters, None)
        result = dataclasses.replace(result, cause=jnp.int32(Cause.NO_GRADIENTS))  # with Off too
        # Buffers of their own: a state may be donated.
        return WrapState(inner.init(params), *jax.tree.map(jnp.copy, (fresh, result)))

    def update(
        grads: Any, state: WrapState, params: Any = None, *, value: Any = None, **more: Any
    ) -> tuple[Any, WrapState]:
        scaler, local = state.scaler, None
        off = isinstance(scaler.rule, Off)
        if axis_name is not None:
            grads, local = _axis.averaged(grads, axis_name), grads
        losses = None if value is None else jnp.asarray(value)
        loss = None if losses is None else losses.sum()
        reading, kinds = read(scaler, grads, losses, axis_name, local, carried=False)
        if loss is not None and axis_name is not None:
            loss = _axis.mean(loss, axis_name)
        parameters = state.result.parameters
        kinds = _placed(kinds, parameters_of(grads), parameters)
        bad_loss = first_bad_loss(losses, axis_name)
        after, result = finish(scaler, reading, kinds, parameters, loss, bad_loss=bad_loss)
        if value is not None and takes_value:
            more["value"] = value
        if off:
            if max_norm is not None:
                grads = unscaled(grads, clip_coefficient(_norm(grads), max_norm, jnp))
            updates, moved = inner.update(grads, state.inner, params, **more)
            return updates, WrapState(moved, after, result)
        # A plain 1.0 XLA leaves out, and then keeps the look's squares for the optimizer.
        factor = jax.lax.optimization_barrier(jnp.float32(1))
        if max_norm is not None:
            factor = clip_coefficient(reading.norm, max_norm, jnp)

        def step() -> tuple[Any, Any]:
            return inner.update(unscaled(grads, factor), state.inner, params, **more)

        shapes, _ = jax.eval_shape(step)
        still = jax.tree.map(lambda u: jnp.full(u.shape, -0.0, u.dtype), shapes)
        updates, moved = gated(result.stepped, step, (still, state.inner))
        return updates, WrapState(moved, after, result)

    return optax.GradientTransformationExtraArgs(init, update)


def _norm(grads: Any) -> Any:
    leaves = leaves_of(grads)
    return look(leaves, 1.0, amax=False).norm if leaves else jnp.float32(0)


def _placed(kinds: Any, found: Parameters, parameters: Parameters) -> Any:
    """`kinds` of the gradients that were found, in the order of the parameters that the state was
    made for: a state keeps its structure whatever gradients come."""
    if [name for name, _ in found] == [name for name, _ in parameters]:
        return kinds
    places = {name: i for i, (name, _) in enumerate(found)}
    parts = [kinds[places[name]] if name in places else jnp.int8(0) for name, _ in parameters]
    return jnp.stack(parts) if parts else no_kinds(())


def scaled(
    fun: Callable[..., Any],
    opt_state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`fun`, whose backward pass runs at the scale that is carried in `opt_state`.

    Its value is the true loss and its gradients are the true ones, whatever takes them:
    `jax.grad`, `nnx.grad`, `equinox.filter_grad`. `argnums` and `has_aux` are those of
    `jax.value_and_grad`.

    >>> state = wrap(optax.sgd(0.1), "static:2^16").init(jnp.ones(2))
    >>> weak = lambda w: (w.astype(jnp.float16) * 2.0**-20).astype(jnp.float32).sum() * 2.0**-20
    >>> jax.grad(weak)(jnp.ones(2)).tolist()
    [0.0, 0.0]
    >>> jax.grad(scaled(weak, state))(jnp.ones(2)).tolist() == [2.0**-40] * 2
    True
    """
    scaler = scaler_in(opt_state)
    if isinstance(scaler.rule, Off):
        return fun
    scale = jnp.asarray(scaler.state.scale)
    places = [argnums] if isinstance(argnums, int) else argnums

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place in places:
            given[place] = _taken_off(given[place], scale)
        out = fun(*given, **kwargs)
        loss = checked_loss(out[0] if has_aux else out)
        if loss.dtype == jnp.float16 and scaler.rule.max_scale > HALF_LOSS_CEILING:
            raise MisuseError(
                "the loss is float16, so the scale itself would be cast to float16 in backward, "
                f"which holds 2^15 at most, and the rule '{scaler.rule}' goes beyond that: compute "
                "the loss in float32 (logits.astype(jnp.float32)), or give the rule max_scale=2^15"
            )
        loss = _times_cotangent(loss, scale)
        return (loss, *out[1:]) if has_aux else loss

    return wrapped


@jax.custom_vjp
def _times_cotangent(x: Any, factor: Any) -> Any:
    """x; on the way back its gradient times `factor`."""
    return x


def _back(factor: Any, cotangent: Any) -> tuple[Any, None]:
    wide = jnp.promote_types(cotangent.dtype, jnp.float32)
    return (cotangent.astype(wide) * factor).astype(cotangent.dtype), None


_times_cotangent.defvjp(lambda x, factor: (x, factor), _back)


def _taken_off(tree: Any, scale: Any) -> Any:
    """The same parameters, whose gradients come back without the scale."""

    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):  # in place: it keeps what it counts
        nnx.update(tree, _taken_off(nnx.state(tree), scale))
        return tree

    def one(path: Any, x: Any) -> Any:
        if not (hasattr(x, "dtype") or isinstance(x, float)):
            return x
        dtype = type_of(x)
        if dtype == jnp.float16:
            raise MisuseError(
                f"the parameter at {name_of(path)} is float16, and so would be its gradient "
                "without the scale: small ones would be zero. Differentiate with gradlift.jax."
                "value_and_grad(fun)(opt_state.scaler, params, ...), which gives float32 gradients "
                "to a wrapped optimizer as well"
            )
        return _times_cotangent(x, 1 / scale) if jnp.issubdtype(dtype, jnp.floating) else x

    return jax.tree_util.tree_map_with_path(one, tree)


def scaler_in(opt_state: Any) -> Scaler:
    """The one scaler in an optimizer's state, with nothing of a chain in front of it."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, Scaler))
    found = [(path, x) for path, x in leaves if isinstance(x, Scaler)]
    if len(found) != 1:
        raise MisuseError(
            f"this optimizer state holds {len(found)} scalers, expected one: pass the state of an "
            "optimizer made by gradlift.jax.wrap(...).init(params)"
        )
    ((path, scaler),) = found
    before: Any = None
    for key in path:
        in_chain = isinstance(key, jax.tree_util.SequenceKey) and key.idx > 0
        by_name = isinstance(key, jax.tree_util.DictKey) and not isinstance(
            before, jax.tree_util.GetAttrKey
        )
        if in_chain or by_name:
            raise MisuseError(
                f"the wrapped optimizer is not the first of its chain (it is at {name_of(path)}): "
                "a transform in front of it sees gradients that nobody has checked, and clipping "
                "hides an overflow. Put the chain inside: wrap(optax.chain(clip, optimizer)), or "
                "clip with wrap(optimizer, max_norm=...)"
            )
        before = key
    return scaler

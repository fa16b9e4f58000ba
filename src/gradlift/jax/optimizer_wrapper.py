"""Route B: an optax optimizer that carries the scaler in its own state."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import HALF_LOSS_CEILING, Cause, checked_max_norm, clip_coefficient
from ..errors import MisuseError
from ..reading import Reading
from ..rules import Off, Rule
from . import devices as _axis
from .application import marked
from .finite_checking import leaves_of, look
from .scaler import (
    Parameters,
    Result,
    Scaler,
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
    """`optimizer` for gradients of `scale_loss(loss, opt_state)`: unscales, clips, skips.

        grads = jax.grad(lambda p: scale_loss(loss_fn(p), opt_state))(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)

    `value=` is the loss without the scale, to tell a loss that is not finite from an overflow;
    of several losses whose gradients were added up, an array of all. After a skip the updates are
    -0.0, which `optax.apply_updates` adds without changing a bit. Gradients that differ along
    `axis_name` are averaged along it. Nothing is retried here, so "auto" is cautious.

    >>> tx = wrap(optax.sgd(0.5), "static:8")
    >>> params = jnp.ones(2)
    >>> state = tx.init(params)
    >>> grads = jax.grad(lambda p: scale_loss(p.sum(), state))(params)
    >>> updates, state = tx.update(grads, state, params)
    >>> grads.tolist(), updates.tolist(), bool(state.result.stepped)
    ([8.0, 8.0], [-0.5, -0.5], True)
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
        if marked(grads):
            raise MisuseError(
                "these gradients come from gradlift.jax.value_and_grad and have lost their scale "
                "already; a wrapped optimizer takes scaled ones. Either apply() them with the "
                "plain optimizer, or differentiate scale_loss(loss, opt_state) with jax.grad"
            )
        scaler, local = state.scaler, None
        off = isinstance(scaler.rule, Off)
        if axis_name is not None:
            grads, local = _axis.averaged(grads, axis_name), grads
        losses = None if value is None else jnp.asarray(value)
        loss = None if losses is None else losses.sum()
        reading, kinds = read(scaler, grads, losses, axis_name, local)
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
        factor = 1 / scaler.state.scale
        if max_norm is not None:
            factor = factor * clip_coefficient(reading.norm, max_norm, jnp)

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


def scale_loss(loss: Any, opt_state: Any) -> Any:
    """loss times the scale that is carried in `opt_state`, wherever in it.

    >>> state = optax.chain(wrap(optax.sgd(0.1), "static:8")).init(jnp.ones(2))
    >>> float(scale_loss(jnp.float32(0.5), state))
    4.0
    """
    scaler = scaler_in(opt_state)
    half = jnp.result_type(loss) == jnp.float16 and not isinstance(scaler.rule, Off)
    if half and scaler.rule.max_scale > HALF_LOSS_CEILING:
        raise MisuseError(
            "the loss is float16, so the scale itself would be cast to float16 in backward, which "
            f"holds 2^15 at most, and the rule '{scaler.rule}' goes beyond that: compute the loss "
            "in float32 (logits.astype(jnp.float32)), or give the rule max_scale=2^15"
        )
    return scaler.scale(loss)


def scaler_in(opt_state: Any) -> Scaler:
    """The one scaler in an optimizer's state."""
    everything = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Scaler))
    found = [x for x in everything if isinstance(x, Scaler)]
    if len(found) != 1:
        raise MisuseError(
            f"this optimizer state holds {len(found)} scalers, expected one: pass the state of an "
            "optimizer made by gradlift.jax.wrap(...).init(params)"
        )
    return found[0]

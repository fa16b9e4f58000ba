"""JAX below Keras: everything goes in and comes out, and a skip is a select, not a branch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..jax._inspect import look
from ..jax._select import gated
from ..reading import Reading
from ._record import Values
from ._traced import nothing, settled


class Noted(NamedTuple):
    """What is known since the last step; None where nothing is."""

    total: Any = None
    """The losses' sum."""
    spoiled: Any = None
    """Was a gradient that `get_unscaled_gradients` saw not finite? Known: it was called."""


_NOTHING = Noted()


class Window:
    """Notes what happens outside of `jit`; inside, nothing written would last."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Any] = {}
        self.traced = False
        """Was `get_unscaled_gradients` called in a trace, and its step not traced yet?"""
        self.clear()

    def clear(self) -> None:
        self.noted = _NOTHING

    def note(self, loss: Any) -> None:
        if not isinstance(loss, jax.core.Tracer):
            total, here = self.noted.total, jnp.sum(loss, dtype=jnp.float32)
            self.noted = self.noted._replace(total=here if total is None else total + here)

    def unscaled(self, true: list[Any], found: Any) -> list[Any]:
        """Gradients were unscaled by hand; was one of them not finite?

        In a trace NaN must tell it: no clip hides that, as it hides inf.
        """
        if isinstance(found, jax.core.Tracer):
            self.traced = True
            return [g if g is None else jnp.where(jnp.isfinite(g), g, jnp.nan) for g in true]
        before = self.noted.spoiled
        self.noted = self.noted._replace(spoiled=found if before is None else before | found)
        return true


def readable(value: Any) -> bool:
    """Can it be read now, or is this a trace?"""
    return not isinstance(value, jax.core.Tracer)


def read(grads: list[Any], inverse: Any, amax: bool) -> tuple[Any, Any, Any]:
    """Is a gradient not finite? The largest |g|, and the true norm."""
    seen = look(grads, inverse, amax=amax)
    return seen.nonfinite, seen.amax, seen.norm


def first_bad(grads: list[tuple[int, Any]]) -> Any:
    """The last variable with a bad gradient is the first that backward made so."""

    def kind(index: int, g: Any) -> Any:
        nan, finite = jnp.isnan(g).any(), jnp.isfinite(g).all()
        return jnp.where(finite, 0, jnp.where(nan, -(index + 1), index + 1))

    kinds = jnp.stack([kind(i, g) for i, g in grads])
    return kinds[jnp.argmax(jnp.abs(kinds))].astype(jnp.float32)


def apply(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """The same with side effects: outside of `jit`, or inside a StatelessScope."""
    mine = opt._trainable_variables
    given = {opt._position(v): g for g, v in zip(grads, variables)}
    full = [given.get(i) for i in range(len(mine))] if grads else []
    values = [v.value for v in opt.variables], full, [v.value for v in mine]
    moved, kept = _compiled(opt, *values, opt._window.noted)
    for variable, value in zip([*mine, *opt.variables], [*moved, *kept]):
        variable.assign(value)
    opt._window.clear()


def _compiled(opt: Any, *values: Any) -> Any:
    """`stateless`, compiled once for each way in which the optimizer may be used."""
    compiled, way = opt._window.compiled, (opt._window.traced, opt._loss_is_half)
    if way not in compiled:
        compiled[way] = jax.jit(functools.partial(stateless, opt))
    return compiled[way](*values)


def stateless_apply(opt: Any, held: list[Any], grads: list[Any], weights: list[Any]) -> Any:
    """`stateless`, called by the user; gradients unscaled in the same trace have met their step."""
    after = stateless(opt, held, grads, weights)
    if not all(readable(g) for g in grads):
        opt._window.traced = False
    return after


def stateless(
    opt: Any, held: list[Any], grads: list[Any], weights: list[Any], noted: Noted = _NOTHING
) -> tuple[list[Any], list[Any]]:
    """New weights and new optimizer variables; the old ones, to the bit, if a step is refused."""
    own, inner = list(held[: len(opt._variables)]), list(held[len(opt._variables) :])
    places = [opt._place(v) for v in opt._kept]
    values = Values(*(own[i] for i in places))
    weights = list(weights)

    def done(after: Values) -> list[Any]:
        for i, value in zip(places, after):
            own[i] = jnp.asarray(value, own[i].dtype)
        return own

    marked = opt._indexed(grads, opt._trainable_variables)
    if not marked:
        return weights, [*done(nothing(values)), *inner]
    used = opt._carried(values.scale)
    by_hand = opt._window.traced or noted.spoiled is not None
    factor = jnp.float32(1) if by_hand else used
    nonfinite, amax, norm = read([g for _, g in marked], 1 / factor, opt.rule.magnitudes)
    if noted.spoiled is not None:
        nonfinite = nonfinite | noted.spoiled
    known = noted.total is not None
    loss = noted.total if known else jnp.float32(jnp.nan)
    dead = ~jnp.isfinite(loss) if known else False
    reading = Reading(nonfinite, amax * (used / factor), dead, norm=norm)
    bad = lax.cond(nonfinite, lambda: first_bad(marked), lambda: jnp.float32(0))
    sound, after = settled(opt.rule, values, used, reading, known, loss, bad)

    def step() -> tuple[Any, Any]:
        true = grads
        if not by_hand:
            inverse = 1 / factor
            true = opt._mapped(lambda g: unscaled(g, inverse), grads, opt._trainable_variables)
        moved, kept = opt.inner_optimizer.stateless_apply(inner, true, weights)
        return list(moved), list(kept)

    moved, inner_after = gated(sound, step, (weights, inner))
    if opt.drop == "window":
        for i, fresh in opt._window_start(inner):
            inner_after[i] = jnp.where(sound, inner_after[i], fresh)
    return moved, [*done(after), *inner_after]


def unscaled(g: Any, inverse: Any) -> Any:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32)) * inverse

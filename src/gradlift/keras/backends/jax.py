"""JAX below Keras: everything goes in and comes out, and a skip is a select, not a branch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.sparse import BCOO

from ...core import loss_blamed
from ...errors import MisuseError
from ...jax.finite_checking import look
from ...jax.selection import gated
from ...reading import Reading
from ..step_record import NO_GRADIENTS, RowReading, Values
from .compiled import finish


class WindowValues(NamedTuple):
    """What is known since the last step; None where nothing is."""

    total: Any = None
    """The losses' sum."""
    any_bad: Any = False
    """One of them was not finite."""
    all_bad: Any = True
    losses: Any = 0
    """How many there were."""
    first_bad: Any = 0
    """The first that was not finite: its index plus one; 0: none."""
    inspection: RowReading | None = None
    """What gradients showed that `get_unscaled_gradients` was given."""


_NOTHING = WindowValues()


class JaxWindow:
    """Notes what happens outside of `jit`; inside, nothing written would last."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Any] = {}
        self.clear()

    def clear(self) -> None:
        self.values = _NOTHING

    def note(self, loss: Any) -> None:
        """What was unscaled before this loss is not of this step."""
        if not readable(loss):
            return
        here, before = jnp.sum(loss, dtype=jnp.float32), self.values
        bad = ~jnp.isfinite(here)
        total = here if before.total is None else before.total + here
        losses = before.losses + 1
        first = jnp.where((before.first_bad == 0) & bad, losses, before.first_bad)
        self.values = WindowValues(total, bad | before.any_bad, bad & before.all_bad, losses, first)

    def unscaled(self, inspection: RowReading) -> None:
        """Gradients were unscaled by hand, and this is what they showed before."""
        if not readable(inspection.nonfinite):
            raise MisuseError(
                "get_unscaled_gradients() notes that the next step gets true gradients, and JAX "
                "keeps no notes of what it traces: inside jit, let the inner optimizer clip "
                "(global_clipnorm=...) and give stateless_apply the scaled gradients"
            )
        self.values = self.values._replace(inspection=inspection)


new_window = JaxWindow


def readable(value: Any) -> bool:
    """Can it be read now, or is this a trace?"""
    return not isinstance(value, jax.core.Tracer)


def number(value: Any) -> Any:
    """A variable's value, as a step computes with it."""
    return jnp.asarray(value, jnp.float32)


def elements(g: Any) -> Any:
    """What there is to look at. Of a sparse gradient, its rows, repeated or not."""
    return g.data if isinstance(g, BCOO) else g


def read(grads: list[Any], inverse: Any, amax: bool) -> tuple[Any, Any, Any]:
    """Is a gradient not finite? The largest |g|, and the true norm."""
    leaves = [v for v in map(elements, grads) if v.size]
    if not leaves:
        return jnp.array(False), jnp.float32(0), jnp.float32(0)
    seen = look(leaves, inverse, amax=amax)
    return seen.nonfinite, seen.amax, seen.norm


def inspect(
    grads: list[tuple[int, Any]],
    overwriting: list[tuple[int, Any]],
    used: Any,
    factor: Any,
    amax: bool,
) -> RowReading:
    """What gradients show that carry `factor`, of a loss that carried `used`, and `overwriting`,
    which carries no factor."""
    nonfinite, top, norm = read([g for _, g in grads], 1 / factor, amax)
    for _, g in overwriting:
        nonfinite |= ~jnp.isfinite(g).all()
    every = [*grads, *overwriting]
    bad = lax.cond(nonfinite, lambda: first_bad(every), lambda: jnp.float32(0))
    return RowReading(nonfinite, top * (used / factor), norm, bad)


def first_bad(grads: list[tuple[int, Any]]) -> Any:
    """The last variable with a bad gradient is the first that backward made so."""

    def kind(index: int, g: Any) -> Any:
        v = elements(g)
        nan, finite = jnp.isnan(v).any(), jnp.isfinite(v).all()
        return jnp.where(finite, 0, jnp.where(nan, -(index + 1), index + 1))

    kinds = jnp.stack([kind(i, g) for i, g in grads])
    return kinds[jnp.argmax(jnp.abs(kinds))].astype(jnp.float32)


def apply(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """The same with side effects: outside of `jit`, or inside a StatelessScope."""
    mine = opt._trainable_variables
    given = {opt._position(v): g for g, v in zip(grads, variables)}
    full = [given.get(i) for i in range(len(mine))] if grads else []
    values = [v.value for v in opt.variables], full, [v.value for v in mine]
    traced = not all(map(readable, jax.tree.leaves(values)))
    weights, kept = _compiled(opt, *values, _NOTHING if traced else opt._window.values)
    for variable, value in zip([*mine, *opt.variables], [*weights, *kept]):
        variable.assign(value)
    opt._window.clear()


def _compiled(opt: Any, *values: Any) -> Any:
    """`stateless`, compiled for float16 losses and for others."""
    compiled, way = opt._window.compiled, opt._loss_is_half
    if way not in compiled:
        compiled[way] = jax.jit(functools.partial(stateless, opt))
    return compiled[way](*values)


def stateless(
    opt: Any,
    held: list[Any],
    grads: list[Any],
    weights: list[Any],
    window: WindowValues = _NOTHING,
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

    marked, overwriting = opt._indexed(grads, opt._trainable_variables)
    anything = bool(marked or overwriting)
    used = opt._carried(values.scale)
    by_hand = window.inspection is not None
    factor = jnp.float32(1) if by_hand else used
    known = window.total is not None
    loss = window.total if known else jnp.float32(jnp.nan)
    reading, culprit = NO_GRADIENTS, 0
    if anything:
        seen = inspect(marked, overwriting, used, factor, opt._wants_amax)
        if window.inspection is not None:
            seen = window.inspection.after_clipping(seen, jnp.where)
        level = jnp.int32(window.any_bad) + jnp.int32(window.all_bad)
        blamed = loss_blamed(level, jnp.int32(seen.nonfinite)) if known else False
        reading = Reading(seen.nonfinite, seen.amax, blamed, norm=seen.norm)
        culprit = seen.culprit
    sound, after = finish(
        opt.rule,
        values,
        used,
        reading,
        loss,
        loss_known=known,
        culprit=culprit,
        half_loss=opt._loss_is_half,
        bad_loss=jnp.where(window.losses > 1, window.first_bad, 0),
    )
    if not anything:
        return weights, [*done(after), *inner]

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
    if isinstance(g, BCOO):
        return BCOO(
            (unscaled(g.data, inverse), g.indices),
            shape=g.shape,
            indices_sorted=g.indices_sorted,
            unique_indices=g.unique_indices,
        )
    return g.astype(jnp.promote_types(g.dtype, jnp.float32)) * inverse

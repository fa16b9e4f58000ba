"""jmp's names, so that its loops run after a change of import."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import MisuseError, warn
from ..reading import Reading
from ..rules import Backoff, ScaleState
from ..rules.base import LARGEST, SMALLEST, is_power_of_two
from .finite_checking import leaves_of, look, type_of
from .scaler import arrays, unscaled
from .selection import chosen


def all_finite(tree: Any) -> Any:
    """Is every number in `tree` finite? One sum, compiled in linear time.

    >>> bool(all_finite({"a": jnp.ones(2)})), bool(all_finite([jnp.array(jnp.nan)]))
    (True, False)
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(type_of(x), jnp.inexact)]
    parts = [
        part
        for x in leaves
        for part in ((jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,))
    ]
    real = leaves_of(parts)
    return ~look(real, 1.0, amax=False).nonfinite if real else jnp.array(True)


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """`a` if `pred` else `b`, leaf by leaf.

    >>> select_tree(jnp.array(False), {"w": jnp.zeros(1)}, {"w": jnp.ones(1)})["w"].tolist()
    [1.0]
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        raise MisuseError(
            f"pred is {jnp.result_type(pred)}{list(jnp.shape(pred))}, expected one boolean"
        )
    return chosen(pred, a, b)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """jmp's: no scale at all.

    >>> NoOpLossScale().scale(3.0)
    3.0
    """

    @property
    def loss_scale(self) -> int:
        return 1

    def scale(self, tree: Any) -> Any:
        return tree

    def unscale(self, tree: Any) -> Any:
        return tree

    def adjust(self, grads_finite: Any) -> NoOpLossScale:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """jmp's: one scale for ever. It scales and unscales in float32.

    >>> scale = StaticLossScale(8.0)
    >>> float(scale.unscale(scale.scale(jnp.float16(0.5))))
    0.5
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        check_power_of_two(self.loss_scale, "loss_scale")

    def scale(self, tree: Any) -> Any:
        return unscaled(tree, jnp.asarray(self.loss_scale, jnp.float32))

    def unscale(self, tree: Any) -> Any:
        return unscaled(tree, 1 / jnp.asarray(self.loss_scale, jnp.float32))

    def adjust(self, grads_finite: Any) -> Any:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(StaticLossScale):
    """jmp's rule, with every field carried through `jit`.

        finite:     counter <- counter + 1; at `period`: loss_scale * factor, counter <- 0
        not finite: loss_scale <- max(min_loss_scale, loss_scale / factor), counter <- 0

    >>> scale = DynamicLossScale(jnp.float32(8), period=1)
    >>> float(scale.adjust(jnp.array(True)).loss_scale)
    16.0
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    period: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: int = dataclasses.field(default=2, metadata={"static": True})
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: jnp.ones((), jnp.float32))

    def __post_init__(self) -> None:
        check_power_of_two(self.loss_scale, "loss_scale")
        check_power_of_two(self.factor, "factor")

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """The next one, after a step whose gradients were finite or not."""
        rule = rule_of(self.factor, 1 / self.factor, self.period)
        state = arrays(ScaleState(self.loss_scale, clean=self.counter, left=1))
        finite = jnp.asarray(grads_finite)
        after = rule.advance(state, Reading(~finite, jnp.float32(1)), jnp)
        floor = jnp.asarray(self.min_loss_scale, jnp.float32)
        scale = jnp.where(finite, after.scale, jnp.maximum(after.scale, floor))
        return dataclasses.replace(self, loss_scale=scale, counter=after.clean)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def rule_of(growth: float, backoff: float, interval: int, least: float = SMALLEST) -> Backoff:
    """A peer's rule, of whatever factors."""
    return Backoff(
        init_scale=least,
        growth_factor=float(growth),
        backoff_factor=float(backoff),
        growth_interval=int(interval),
        min_scale=least,
        max_scale=LARGEST,
        powers_of_two=False,
    )


def check_power_of_two(value: Any, name: str) -> None:
    """Warns of a factor that rounds. Arrays in a trace, and what JAX puts in their place, pass."""
    if isinstance(value, (int, float)) and not is_power_of_two(value):
        _warn(name, value)


@functools.cache  # once: JAX makes such an object anew whenever it passes through a `jit`
def _warn(name: str, value: float) -> None:
    warn(
        f"{name} is {value!r}, not a power of two, so every gradient is rounded once more when it "
        "is unscaled"
    )

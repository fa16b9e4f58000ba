"""jmp's names, so that its loops run after a change of import: its trees, its types, its scales."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import MisuseError, warn
from ..rules import Backoff
from ..rules.base import LARGEST, SMALLEST, is_power_of_two
from .finite_checking import leaves_of, look, type_of
from .selection import chosen


class PredicateError(MisuseError, AssertionError):
    """Not one boolean; jmp raises an AssertionError.

    >>> select_tree(jnp.ones(2, bool), {}, {})
    Traceback (most recent call last):
    gradlift.jax.jmp_names.PredicateError: pred is bool[2], expected boolean scalar
    """


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
    _check_boolean(pred, "pred")
    return chosen(pred, a, b)


@jax.tree_util.register_static
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """jmp's: one scale for ever, no leaf of a tree. Types are those of `x * loss_scale`.

    >>> scale = StaticLossScale(8.0)
    >>> scale.unscale(scale.scale(jnp.float16(0.5)))
    Array(0.5, dtype=float16)
    >>> jax.tree.leaves(scale)
    []
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        check_power_of_two(self.loss_scale, "loss_scale")
        object.__setattr__(self, "loss_scale", _hashable(self.loss_scale))

    def scale(self, tree: Any) -> Any:
        return _times(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> StaticLossScale:
        return self


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss_scale", "counter"],
    meta_fields=["period", "factor", "min_loss_scale"],
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """jmp's rule. Two leaves as in jmp; `min_loss_scale` is carried through `jit` with them.

        finite:     counter <- counter + 1; at `period`: loss_scale * factor, counter <- 0
        not finite: loss_scale <- max(min_loss_scale, loss_scale / factor), counter <- 0

    The scale keeps its type. It never becomes inf, nor less than its type's smallest normal number.

    >>> scale = DynamicLossScale(jnp.float32(8), period=1)
    >>> float(scale.adjust(jnp.array(True)).loss_scale), len(jax.tree.leaves(scale))
    (16.0, 2)
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros((), np.int32))
    period: int = 2000
    factor: int = 2
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.float32(1))

    def __post_init__(self) -> None:
        _check_floating(self.loss_scale, "loss_scale")
        _check_floating(self.min_loss_scale, "min_loss_scale")
        check_power_of_two(self.loss_scale, "loss_scale")
        check_power_of_two(self.factor, "factor")
        if isinstance(self.min_loss_scale, jax.core.Tracer):
            raise MisuseError(
                "min_loss_scale is traced, and is no leaf of a loss scale, so it could not leave "
                "this jit: give it as a number or a NumPy scalar, such as np.float32(1)"
            )
        object.__setattr__(self, "min_loss_scale", _hashable(self.min_loss_scale))

    def scale(self, tree: Any) -> Any:
        return _times(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """The next one, after a step whose gradients were finite or not."""
        finite = jnp.asarray(grads_finite, bool)
        _check_boolean(finite, "grads_finite")
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        clean = counter + 1
        due = clean >= self.period
        grown = jnp.where(due & jnp.isfinite(scale * self.factor), scale * self.factor, scale)
        least = jnp.maximum(self.min_loss_scale, jnp.finfo(scale.dtype).smallest_normal)
        lowered = jnp.maximum(least, scale / self.factor)
        after = jnp.where(finite, grown, lowered).astype(scale.dtype)
        counter = jnp.where(finite & ~due, clean, 0).astype(counter.dtype)
        return dataclasses.replace(self, loss_scale=after, counter=counter)


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


def _check_floating(value: Any, name: str) -> None:
    """Warns of whole numbers as jmp does. What JAX puts in place of a leaf passes."""
    if isinstance(value, (int, np.generic, np.ndarray, jax.Array)):
        dtype = jnp.result_type(value)
        if not jnp.issubdtype(dtype, jnp.floating):
            warn(
                f"Expected floating type for {name}, got {dtype}: write it as a float, such as "
                "jnp.float32(2**15)"
            )


def _check_boolean(value: Any, name: str) -> None:
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or dtype != jnp.bool_:
        raise PredicateError(f"{name} is {dtype}{list(shape)}, expected boolean scalar")


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor, tree)


def _hashable(value: Any) -> Any:
    """A number that can be part of a tree's structure, with the type it had."""
    concrete = isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value)[()] if concrete else value

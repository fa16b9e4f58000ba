"""jmp's and flax's names, so that their loops run after a change of import."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import MisuseError
from ..reading import Reading
from ..rules import Backoff, ScaleState
from ..rules._rule import LARGEST, SMALLEST, is_power_of_two
from ._grad import value_and_grad
from ._inspect import leaves_of, look, type_of
from ._scaler import Scaler, arrays, unscaled
from ._select import chosen


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
        _checked(self.loss_scale, "loss_scale")

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
        _checked(self.loss_scale, "loss_scale")
        _checked(self.factor, "factor")

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """The next one, after a step whose gradients were finite or not."""
        rule = _rule(self.factor, 1 / self.factor, self.period)
        state = arrays(ScaleState(self.loss_scale, clean=self.counter, left=1))
        finite = jnp.asarray(grads_finite)
        after = rule.advance(state, Reading(~finite, jnp.float32(1)), jnp)
        floor = jnp.asarray(self.min_loss_scale, jnp.float32)
        scale = jnp.where(finite, after.scale, jnp.maximum(after.scale, floor))
        return dataclasses.replace(self, loss_scale=scale, counter=after.clean)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


class _Scaled(NamedTuple):
    """flax's four: the next scale, is it finite, the value, the gradients."""

    dynamic_scale: DynamicScale
    finite: Any
    aux: Any
    grad: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """flax's shape of it: `ds, finite, (loss, aux), grads = ds.value_and_grad(f)(params)`.

    flax's numbers; it grows on the N-th clean step, where flax does on the N+1-th (the rule
    `"flax"` does so too). A dead loss does not lower the scale.

    >>> ds, finite, loss, grads = DynamicScale().value_and_grad(lambda w: w.sum())(jnp.ones(2))
    >>> bool(finite), grads.tolist(), float(ds.scale)
    (True, [1.0, 1.0], 65536.0)
    """

    growth_factor: float = dataclasses.field(default=2.0, metadata={"static": True})
    backoff_factor: float = dataclasses.field(default=0.5, metadata={"static": True})
    growth_interval: int = dataclasses.field(default=2000, metadata={"static": True})
    fin_steps: Any = 0
    scale: Any = 65536.0
    minimum_scale: float | None = dataclasses.field(default=SMALLEST, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("growth_factor", "backoff_factor", "scale"):
            _checked(getattr(self, name), name)

    def replace(self, **changes: Any) -> DynamicScale:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Callable[..., Any]:
        """Like `jax.value_and_grad`, with this scale; averaged along `axis_name`."""
        least = SMALLEST if self.minimum_scale is None else float(self.minimum_scale)
        rule = _rule(self.growth_factor, self.backoff_factor, self.growth_interval, least)
        state = arrays(ScaleState(self.scale, clean=self.fin_steps, left=1))
        compute = value_and_grad(fun, argnums, has_aux, axis_name=axis_name)

        def scaled(*args: Any) -> _Scaled:
            value, grads, after, result = compute(Scaler(rule, state), *args)
            moved = self.replace(scale=after.state.scale, fin_steps=after.state.clean)
            return _Scaled(moved, result.stepped, value, grads)

        return scaled


def _rule(growth: float, backoff: float, interval: int, least: float = SMALLEST) -> Backoff:
    return Backoff(
        init_scale=least,
        growth_factor=float(growth),
        backoff_factor=float(backoff),
        growth_interval=int(interval),
        min_scale=least,
        max_scale=LARGEST,
        powers_of_two=False,
    )


def _checked(value: Any, name: str) -> None:
    """Warns of a factor that rounds. Arrays in a trace, and what JAX puts in their place, pass."""
    if isinstance(value, (int, float)) and not is_power_of_two(value):
        _warn(name, value)


@functools.cache  # once: JAX makes such an object anew whenever it passes through a `jit`
def _warn(name: str, value: float) -> None:
    warnings.warn(
        f"{name} is {value!r}, not a power of two, so every gradient is rounded once more when it "
        "is unscaled",
        stacklevel=5,
    )

"""flax's `DynamicScale`, so that its loops run after a change of import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ..rules import ScaleState
from ..rules.base import SMALLEST
from .differentiate import value_and_grad
from .jmp_names import check_power_of_two, rule_of
from .scaler import (
    Scaler,
    arrays,
    fields_to_save,
    saved_by_flax,
    tell_flax,
    with_saved_fields,
)


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

    flax's numbers, its two leaves, and what flax saves of it. It grows on the N-th clean step, as
    flax's own tests ask; its releases up to 0.12.8 do on the N+1-th (the rule `"flax"` does so
    too). A loss that is not finite does not lower the scale.

    >>> import jax.numpy as jnp
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
            check_power_of_two(getattr(self, name), name)
        tell_flax()

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
        rule = rule_of(self.growth_factor, self.backoff_factor, self.growth_interval, least)
        state = arrays(ScaleState(self.scale, clean=self.fin_steps, left=1))
        compute = value_and_grad(fun, argnums, has_aux, axis_name=axis_name)

        def scaled(*args: Any) -> _Scaled:
            value, grads, after, result = compute(Scaler(rule, state), *args)
            moved = self.replace(scale=after.state.scale, fin_steps=after.state.clean)
            return _Scaled(moved, result.stepped, value, grads)

        return scaled


saved_by_flax(DynamicScale, fields_to_save, with_saved_fields)

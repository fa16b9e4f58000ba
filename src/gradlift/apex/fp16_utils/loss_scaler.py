"""`LossScaler` and `DynamicLossScaler`, for loops that unscale and step by themselves.

>>> import torch
>>> w = torch.nn.Parameter(torch.ones(1).half())
>>> scaler = DynamicLossScaler(init_scale=2.0**16)
>>> for _ in range(2):
...     w.grad = None
...     scaler.backward(w.float().sum())
...     overflow = scaler.has_overflow([w])
...     print(scaler.loss_scale, overflow)
...     scaler.update_scale(overflow)
65536.0 True
32768.0 False
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import SettingsError
from ...reading import Reading
from ...rules import Rule
from ..opt_levels import scale_rule

__all__ = ["DynamicLossScaler", "LossScaler"]

_DYNAMIC = {"init_scale": "init_scale", "scale_window": "growth_interval"}


def dynamic_rule(arguments: dict[str, Any]) -> Rule:
    """apex's rule, from its `init_scale`, `scale_factor` and `scale_window`.

    >>> dynamic_rule({"init_scale": 2.0**20, "scale_window": 500}).growth_interval
    500
    """
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "scale_factor":
            settings |= {"growth_factor": float(value), "backoff_factor": 1 / float(value)}
        elif name in _DYNAMIC:
            settings[_DYNAMIC[name]] = value
        else:
            known = ", ".join([*_DYNAMIC, "scale_factor"])
            raise SettingsError(f"dynamic_loss_args has {name!r}, expected {known}")
    return scale_rule("dynamic", 1.0, None, name="apex-fp16", **settings)


class FP16LossScaler:
    """A constant scale; gradients are checked all the same, which apex's `LossScaler` does not.

    >>> LossScaler(128.0).loss_scale
    128.0
    """

    def __init__(self, scale: float = 1) -> None:
        self._begin(scale_rule(float(scale)))

    def _begin(self, rule: Rule) -> None:
        self._rule, self._state = rule, rule.init()

    @property
    def loss_scale(self) -> float:
        return float(self._state.scale)

    @property
    def cur_scale(self) -> float:
        """May be set by hand."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._state = self._state._replace(scale=float(value))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Is any gradient not finite?"""
        grads = (p.grad for p in params if p.grad is not None)
        return any(not bool(torch.isfinite(grad).all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale, after every backward pass."""
        self._state = self._rule.advance(self._state, Reading(bool(overflow), 0.0))

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """A backward hook that scales."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`(loss * loss_scale).backward()`, scaled in float32."""
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        (wide * self.loss_scale).backward(retain_graph=retain_graph)


class FP16DynamicLossScaler(FP16LossScaler):
    """A scale that an overflow divides by `scale_factor`, down to 1, and `scale_window` passes
    without one multiply by it.

    >>> scaler = DynamicLossScaler(init_scale=2.0**16)
    >>> scaler.update_scale(True)
    >>> scaler.loss_scale
    32768.0
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        given = {"scale_factor": scale_factor, "scale_window": scale_window}
        self._begin(dynamic_rule({"init_scale": float(init_scale), **given}))


LossScaler = FP16LossScaler
DynamicLossScaler = FP16DynamicLossScaler

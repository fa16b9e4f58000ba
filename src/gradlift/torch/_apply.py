"""unscale + clip + step: one factor, folded into the optimizer where it can take it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import MisuseError

_REFUSED = {
    "CPUOffloadOptimizer": "it steps while backward is still running, before anyone could check",
}


def refuse(optimizer: Any) -> None:
    """Optimizers that cannot be guarded are refused by name."""
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise MisuseError(f"GradScaler cannot guard a {name}: {_REFUSED[name]}")
    if any("_in_backward_optimizers" in vars(p) for p in _first_params(optimizer)):
        raise MisuseError(
            "these parameters are stepped by an optimizer inside backward(), before anyone could "
            "check their gradients: step them after backward() to use a GradScaler"
        )
    if not hasattr(optimizer, "param_groups"):
        raise MisuseError(
            f"step() wants an optimizer, this is a {name}: call scaler.step(optimizer)"
        )


def _first_params(optimizer: Any) -> list[Tensor]:
    return [
        group["params"][0] for group in getattr(optimizer, "param_groups", []) if group["params"]
    ]


def is_fused(optimizer: Any) -> bool:
    """Does its step take `grad_scale` and `found_inf`?"""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def must_know(optimizer: Any) -> bool:
    """Fused SGD leaves its momentum uninitialised if its very first step is skipped on a device:
    before that one step the verdict has to be read."""
    return (
        isinstance(optimizer, torch.optim.SGD)
        and not optimizer.state
        and any(group["momentum"] for group in optimizer.param_groups)
    )


def multiply(params: list[Tensor], grads: list[Tensor], factor: float | Tensor) -> None:
    """grads *= factor, in place, in one pass a device; what cannot be written is replaced."""
    if not grads or (isinstance(factor, float) and factor == 1.0):
        return
    with torch.no_grad():
        for i, (p, g) in enumerate(zip(params, grads)):
            if 0 in g.stride() and g.numel() > 1:  # expanded: many elements, one place in memory
                p.grad = grads[i] = g.clone(memory_format=torch.contiguous_format)
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(grads, factor)
            return
        for device in dict.fromkeys(g.device for g in grads):
            here = [g for g in grads if g.device == device]
            torch._foreach_mul_(here, factor.to(device, non_blocking=True))


def folded_step(
    optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    """A fused step that divides by `grad_scale` and does nothing where `found_inf` is 1."""
    theirs = getattr(optimizer, "grad_scale", None)
    if grad_scale is not None:
        optimizer.grad_scale = grad_scale if theirs is None else grad_scale * theirs
    if found_inf is not None:
        optimizer.found_inf = found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            if name in vars(optimizer):
                delattr(optimizer, name)


class Snapshot:
    """Parameters and state of an optimizer whose step may have to be undone."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.values = [p.detach().clone() for p in self.params]
        self.state = copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        with torch.no_grad():
            for p, value in zip(self.params, self.values):
                p.copy_(value)
        self.optimizer.load_state_dict(self.state)

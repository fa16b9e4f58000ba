"""unscale + clip + step: one factor, folded into the optimizer where it can take it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import MisuseError
from ._gradients import multiply
from ._masters import MasterWeights

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
    inner = optimizer._inner if isinstance(optimizer, MasterWeights) else optimizer
    return (
        isinstance(inner, torch.optim.SGD)
        and not inner.state
        and any(group["momentum"] for group in optimizer.param_groups)
    )


def take_in(window: Any, factor: float | Tensor) -> None:
    """A window's gradients *= factor, now; 16-bit ones that have masters in float32."""
    if isinstance(window.optimizer, MasterWeights):
        window.grads = window.optimizer._hold(factor)
    else:
        multiply(window.params, window.grads, factor)


def folded_step(
    optimizer: Any,
    grad_scale: float | Tensor,
    found_inf: Tensor | None,
    *args: Any,
    just_read: bool = False,
    **kwargs: Any,
) -> Any:
    """A fused step that divides by `grad_scale` and does nothing where `found_inf` is 1."""
    if just_read and isinstance(optimizer, MasterWeights):
        optimizer._just_taken = not optimizer._has_hooks()  # nobody can have changed a gradient
    theirs = getattr(optimizer, "grad_scale", None)
    if isinstance(grad_scale, Tensor) or grad_scale != 1:
        if not isinstance(grad_scale, Tensor) and not isinstance(optimizer, MasterWeights):
            grad_scale = torch.tensor(grad_scale, dtype=torch.float32)
        optimizer.grad_scale = grad_scale if theirs is None else grad_scale * theirs
    if found_inf is not None:
        optimizer.found_inf = found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        if just_read and isinstance(optimizer, MasterWeights):
            optimizer._just_taken = False
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

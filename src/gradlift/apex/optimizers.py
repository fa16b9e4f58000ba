"""`apex.optimizers` over torch's own: `FusedAdam`, `FusedSGD`, `FusedAdagrad`. The others can be
imported; making one says what to use instead."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SettingsError
from .fp16_utils import FP16_Optimizer

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


class FusedAdam:
    """torch's AdamW, or Adam if not `adam_w_mode`. No kernel of apex's is in it.

    It loads what apex's own has saved.

    >>> type(FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1)).__name__
    'AdamW'
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        if not bias_correction:
            raise SettingsError("bias_correction=False: torch's Adam always corrects")
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        adam = kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        adam.register_load_state_dict_pre_hook(_with_steps)
        return adam


def _with_steps(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """apex counts a group's steps, torch each parameter's."""
    state, groups = dict(saved["state"]), []
    for group in saved["param_groups"]:
        if "step" in group:
            step = torch.tensor(float(group["step"]))
            state |= {i: {**state[i], "step": step.clone()} for i in group["params"] if i in state}
        groups.append({k: v for k, v in group.items() if k != "step"})
    return {**saved, "state": state, "param_groups": groups}


class FusedSGD:
    """torch's SGD. No kernel of apex's is in it.

    >>> type(FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)).__name__
    'SGD'
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> torch.optim.Optimizer:
        if wd_after_momentum:
            raise SettingsError("wd_after_momentum=True: torch's SGD decays before")
        return torch.optim.SGD(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )


class FusedAdagrad:
    """torch's Adagrad. No kernel of apex's is in it.

    >>> type(FusedAdagrad([torch.nn.Parameter(torch.ones(1))], lr=0.1)).__name__
    'Adagrad'
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> torch.optim.Optimizer:
        if adagrad_w_mode:
            raise SettingsError(
                "adagrad_w_mode=True: torch's Adagrad adds weight_decay to gradients"
            )
        return torch.optim.Adagrad(params, lr=lr, eps=eps, weight_decay=weight_decay)


class NotHere:
    """An optimizer that torch does not have."""

    instead = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SettingsError(
            f"apex's {type(self).__name__} is not here, and torch has none: use {self.instead}"
        )


class FusedLAMB(NotHere):
    """
    >>> FusedLAMB([])
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: apex's FusedLAMB is not here, and torch has none: use \
timm.optim.Lamb from the package timm, or FusedAdam
    """

    instead = "timm.optim.Lamb from the package timm, or FusedAdam"


class FusedMixedPrecisionLamb(FusedLAMB):
    """
    >>> FusedMixedPrecisionLamb([])
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: apex's FusedMixedPrecisionLamb is not here, and torch has none: \
use timm.optim.Lamb from the package timm, or FusedAdam
    """


class FusedNovoGrad(NotHere):
    """
    >>> FusedNovoGrad([])
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: apex's FusedNovoGrad is not here, and torch has none: use \
timm.optim.NvNovoGrad from the package timm, or FusedAdam
    """

    instead = "timm.optim.NvNovoGrad from the package timm, or FusedAdam"

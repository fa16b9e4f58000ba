"""Hugging Face Accelerate: gradlift's scaler in an `Accelerator`.

>>> from accelerate import Accelerator
>>> accelerator = Accelerator(mixed_precision="fp16", cpu=True)
>>> scaler = install(accelerator, rule="auto")
>>> accelerator.scaler is scaler
True
"""

# ruff: noqa: E402 - the trainer is imported when its version is known to fit

from __future__ import annotations

import functools
from typing import Any

from .versions import require

require("accelerate", "1.15", "2")

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

from ..errors import SettingsError
from ..rules import Rule
from ..torch import GradScaler
from .trainer_scaler import TrainerScaler, parameters_of

__all__ = ["install"]

_REFUSED = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}


def install(
    accelerator: Accelerator, rule: Rule | str | float | None = None, **settings: Any
) -> GradScaler:
    """Puts a `GradScaler` with these settings into the accelerator, and returns it.

    Before or after `prepare`, and whatever `mixed_precision` says: with "fp16" on a CPU, where
    Accelerate computes in float32 and scales nothing, there is float16 autocast from now on.
    `save_state` and `load_state` keep the scaler.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> scaler = install(accelerator, rule="static:1024")
    >>> model, optimizer = accelerator.prepare(model, optimizer)
    >>> accelerator.backward(model(torch.ones(2, 4)).mean() * float("inf"))
    >>> optimizer.step()
    >>> accelerator.optimizer_step_was_skipped, scaler.result.cause
    (True, <Cause.LOSS_NONFINITE: 2>)
    """
    kind = accelerator.distributed_type
    if kind.value in _REFUSED:
        raise SettingsError(
            f"this accelerator uses {kind.value}, which shards gradients or scales them by itself: "
            "gradlift.integrations.accelerate is for one process, or for several with DDP"
        )
    if accelerator.scaler_handler is not None:
        settings = {**accelerator.scaler_handler.to_kwargs(), **settings}
    scaler = _Scaler(accelerator, rule, settings)
    accelerator.scaler = scaler
    accelerator.unscale_gradients = functools.partial(_unscale_gradients, accelerator)
    for optimizer in accelerator._optimizers:
        optimizer.scaler = scaler
        optimizer.__setstate__({})  # makes what an optimizer needs that was prepared with a scaler
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        accelerator.native_amp = True
        _autocast(accelerator)
    return scaler


class _Scaler(TrainerScaler):
    """Holds all prepared optimizers, and sets for each whether it was skipped."""

    def __init__(self, accelerator: Accelerator, rule: Any, settings: dict[str, Any]) -> None:
        super().__init__(accelerator.device.type, rule, **settings)
        self._accelerator: Accelerator | None = accelerator
        self.parameters = lambda: parameters_of(accelerator._optimizers)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        value = super().step(optimizer, *args, **kwargs)
        # Accelerate takes a step for applied if the optimizer was called. But a fused one is called
        # on a device in any case, and LBFGS may have been put back.
        for each in self._accelerator._optimizers if self._accelerator else ():
            if _inner(each) is optimizer:
                result = self.result
                each._accelerate_step_called = result is not None and result.stepped
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_accelerator": None}


def _unscale_gradients(accelerator: Accelerator, optimizer: Any = None) -> None:
    """Accelerate's own does nothing unless `mixed_precision` is "fp16"."""
    chosen = accelerator._optimizers if optimizer is None else optimizer
    for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
        accelerator.scaler.unscale_(_inner(each))


def _inner(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _autocast(accelerator: Accelerator) -> None:
    """Models that were prepared before: once more, for the autocast they did not get."""
    models, accelerator._models = accelerator._models, []
    for model in models:
        model._is_accelerate_prepared = False
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

"""Lightning's Trainer: a precision plugin that holds gradlift's scaler.

>>> from lightning.pytorch import Trainer
>>> plugin = MixedPrecision("16-mixed", "cpu", rule="auto", max_consecutive_skips=50)
>>> trainer = Trainer(accelerator="cpu", plugins=[plugin], logger=False, barebones=True)
>>> trainer.precision_plugin.scaler.get_scale()
65536.0
"""

# ruff: noqa: E402 - the trainer is imported when its version is known to fit

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from .versions import require

require("lightning", "2.6", "3")

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision as Base
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..errors import MisuseError
from ..rules import Rule
from .trainer_scaler import parameters_of, scaler_for

__all__ = ["MixedPrecision"]


class MixedPrecision(Base):
    """For `Trainer(plugins=[...])`: autocast, and `gradlift.torch.GradScaler` with these settings.

    `precision` is "16-mixed", or "bf16-mixed", which needs no scaler. What a step came to is in
    `trainer.precision_plugin.scaler.result`; "loss_scale" and "skipped_steps" are logged whenever
    the loggers are due.

    >>> MixedPrecision("16-mixed", "cpu", rule="static:1024").scaler.get_scale()
    1024.0
    >>> MixedPrecision("bf16-mixed", "cpu").scaler is None
    True
    """

    scaler: Any
    """A `TrainerScaler`, or None."""

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed",
        device: str = "cpu",
        rule: Rule | str | float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(precision, device, scaler_for(precision, device, rule, settings))
        self._losses = 0
        """Scaled since the last step."""
        self._loop: Any = None
        self._watched = False

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Every fit begins here: learns who else looks at gradients, and guards the schedule."""
        if self.scaler is not None and optimizers:
            self.scaler.parameters = lambda: parameters_of(optimizers)
            module: Any = next(m for m in model.modules() if isinstance(m, pl.LightningModule))
            looks = "on_before_optimizer_step"
            self._watched = (
                is_overridden(looks, module)
                or is_overridden("configure_gradient_clipping", module)
                or any(is_overridden(looks, callback) for callback in module.trainer.callbacks)
            )
            loop = self._loop = module.trainer.fit_loop.epoch_loop
            loop.update_lr_schedulers = functools.partial(self._schedule, loop.update_lr_schedulers)
        return super().connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        self._losses = 0
        if self._loop is not None:
            del self._loop.update_lr_schedulers
            self._loop = self.scaler.parameters = None
            self.scaler.flush()

    def _schedule(self, move: Callable[..., None], interval: str, **kwargs: Any) -> None:
        """A schedule in steps stays where it is if the weights did."""
        result = self.scaler.result
        if interval != "step" or (result is not None and result.stepped):
            move(interval=interval, **kwargs)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        if not isinstance(module, pl.LightningModule):
            raise MisuseError("this is for the Trainer: Fabric has gradlift.integrations.fabric")
        self._losses += 1
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        searches = isinstance(optimizer, torch.optim.LBFGS)
        if searches:
            closure = functools.partial(self._wrap_closure, model, optimizer, closure)
            value = self.scaler.step(optimizer, closure, **kwargs)
        else:
            value = closure()
            if model.automatic_optimization and not self._losses:
                self.scaler._last = None  # `training_step` gave no loss: there is nothing to step
                return value
            self._after_closure(model, optimizer)
            value = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        self._losses = 0
        self._log(model)
        return value

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Hooks and clipping."""
        if self._watched:
            self.scaler.unscale_(optimizer)
        super()._after_closure(model, optimizer)

    def _log(self, model: Any) -> None:
        """When a logger wants it, as a device has to be asked, and where Lightning lets one log."""
        hook, due = model._current_fx_name, model.trainer._logger_connector.should_update_logs
        if due and hook in ("training_step", "optimizer_step", "on_train_batch_end"):
            result, skipped = self.scaler.result, float(self.scaler.skipped_steps)
            values = {"loss_scale": result.scale, "skipped_steps": skipped}
            model.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if clip_val > 0 and self.scaler is not None:
            if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
                self.scaler.clip_grad_norm_(optimizer, clip_val)
                return
            self.scaler.unscale_(optimizer)
        # Lightning's own, which refuses fused optimizers, is left out.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

"""Lightning Fabric: a precision plugin that holds gradlift's scaler.

>>> from lightning.fabric import Fabric
>>> fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu")])
>>> fabric.strategy.precision.scaler.get_scale()
65536.0
"""

# ruff: noqa: E402 - the trainer is imported when its version is known to fit

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

from .versions import require

require("lightning", "2.6", "3")

from lightning.fabric.plugins import MixedPrecision as Base
from torch.nn import Module

from ..rules import Rule
from .trainer_scaler import TrainerScaler, scaler_for

__all__ = ["MixedPrecision"]


class MixedPrecision(Base):
    """For `Fabric(plugins=[...])`: autocast, and `gradlift.torch.GradScaler` with these settings.

    What a step came to is in `plugin.scaler.result`: move your schedule if it has `stepped`. Save
    the plugin with the rest: `fabric.save(path, {"model": model, "precision": plugin, ...})`.

    >>> plugin = MixedPrecision("16-mixed", "cpu", rule="auto", max_consecutive_skips=50)
    >>> plugin.state_dict()["scale"]
    65536.0
    """

    scaler: TrainerScaler | None

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed",
        device: str = "cpu",
        rule: Rule | str | float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(precision, device, scaler_for(precision, device, rule, settings))
        self._modules: WeakSet[Module] | None = None

    def convert_module(self, module: Module) -> Module:
        """Every `setup` comes here, so that it is known which gradients there may be."""
        if self.scaler is not None:
            modules = self._modules = self._modules or WeakSet()
            modules.add(module)
            self.scaler.parameters = lambda: (p for m in modules for p in m.parameters())
        return super().convert_module(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_modules": None}

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        value = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return value

    def unscale_gradients(self, optimizer: Any) -> None:
        """What `fabric.clip_gradients` does first; it works with fused optimizers too."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

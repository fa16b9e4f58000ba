"""What the last `amp.initialize` set up. apex has one such state a process, and so has this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MisuseError
from ..journal import JournalLike
from ..rules import Rule
from ..torch import GradScaler
from ..torch.scaler.settings import with_scale_allowed
from .opt_levels import Level, scale_rule


@dataclass
class Amp:
    """The scaler of all losses, each under a key of its own, and whether O1 casts."""

    scaler: GradScaler | None = None
    """None if disabled, or before `initialize`."""
    own_rule: Rule | None = None
    """apex's rule, if no other was asked for: its state is apex's two numbers."""
    num_losses: int = 1
    verbosity: int = 1
    casts: bool = False
    """Do functions with a type of their own cast? Models at O1 always do."""
    opt_properties: Level | None = None
    """The level, with what was overridden."""
    handle: Any = None
    """`handle._deactivate()` ends the casts, those of models too."""
    deactivated: bool = False
    overflows: dict[int, bool] = field(default_factory=dict)
    """Of each loss: did its latest pass have gradients that are not finite?"""
    initialized: bool = False
    paused: int = 0
    allow_incoming_model_not_fp32: bool = False
    """May a model that comes to `initialize` have float16 weights? Scripts set it."""

    @property
    def no_casts(self) -> bool:
        return bool(self.paused or self.deactivated)

    @property
    def casting(self) -> bool:
        return self.casts and not self.no_casts

    def begin(self, **settings: Any) -> None:
        """Starts anew; `disable_casts` around it stays, and what the script has allowed."""
        if self.handle is not None:
            self.handle._deactivate()
        kept = {name: getattr(self, name) for name in ("paused", "allow_incoming_model_not_fp32")}
        vars(self).update(vars(Amp(**settings, initialized=True, **kept)))

    def check(self) -> None:
        if not self.initialized:
            raise MisuseError(
                "amp is not initialized: call model, optimizer = amp.initialize(model, optimizer, "
                "opt_level=...) first"
            )

    def key(self, loss_id: int) -> str | None:
        """The scaler's key of a loss; None if there is but one."""
        if not 0 <= loss_id < self.num_losses:
            raise MisuseError(
                f"loss_id is {loss_id!r}, expected 0 to {self.num_losses - 1}: for more losses "
                "call amp.initialize with a larger num_losses"
            )
        return None if self.num_losses == 1 else f"loss {loss_id}"

    @property
    def loss_scalers(self) -> list[LossScalerView]:
        """As scripts know them from apex, to print the scale or to set it."""
        return [LossScalerView(self, i) for i in range(self.num_losses if self.scaler else 0)]


class LossScalerView:
    """`amp._amp_state.loss_scalers[i]`."""

    def __init__(self, amp: Amp, loss_id: int) -> None:
        self._amp, self._loss_id = amp, loss_id

    @property
    def _scale(self) -> Any:
        assert self._amp.scaler is not None
        return self._amp.scaler.scale_of(self._amp.key(self._loss_id))

    def loss_scale(self) -> float:
        return float(self._scale.numbers().scale)

    @property
    def dynamic(self) -> bool:
        assert self._amp.scaler is not None
        return not _is_constant(self._amp.scaler.rule)

    @property
    def _loss_scale(self) -> float:
        """May be set by hand, outside of `amp.scale_loss`."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        from .guard import settle  # which is made of this state

        settle(self._loss_id)
        amp, scale, value = self._amp, self._scale, float(value)
        assert amp.scaler is not None
        rule = amp.scaler.rule
        constant = amp.scaler.active and _is_constant(rule)
        other = scale_rule(value) if constant else with_scale_allowed(rule, value)
        if amp.own_rule == rule:
            amp.own_rule = other
        amp.scaler.use_rule(other)
        scale.put(scale.numbers()._replace(scale=value))

    @property
    def _unskipped(self) -> int:
        return int(self._scale.numbers().clean)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scale.put(self._scale.numbers()._replace(clean=int(value)))

    @property
    def _has_overflow(self) -> bool:
        return self._amp.overflows.get(self._loss_id, False)


def _is_constant(rule: Rule) -> bool:
    return rule.min_scale == rule.max_scale


AMP = Amp()


def make_scaler(
    device: str, rule: Rule | str | float | None, journal: JournalLike | None
) -> GradScaler:
    """gradlift's scaler. If `gradlift run` records this process it has put its own, which records,
    in the place of torch's."""
    recorded: Any = torch.amp.GradScaler
    if issubclass(recorded, GradScaler):
        return recorded(device, rule=rule)
    return GradScaler(device, rule=rule, journal=journal, allow_fp16_params=True)

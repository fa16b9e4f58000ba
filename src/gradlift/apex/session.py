"""What the last `amp.initialize` set up. apex has one such state a process, and so has this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MisuseError
from ..journal import JournalLike
from ..rules import Rule
from ..torch import GradScaler


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
    initialized: bool = False
    paused: int = 0

    @property
    def casting(self) -> bool:
        return self.casts and not self.paused

    def begin(self, **settings: Any) -> None:
        """Starts anew; `disable_casts` around it stays."""
        vars(self).update(vars(Amp(**settings, initialized=True, paused=self.paused)))

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
    def loss_scalers(self) -> list[LossScaler]:
        """As scripts know them from apex, to print the scale."""
        return [LossScaler(self, i) for i in range(self.num_losses if self.scaler else 0)]


class LossScaler:
    """`amp._amp_state.loss_scalers[i]`."""

    def __init__(self, amp: Amp, loss_id: int) -> None:
        self._amp, self._loss_id = amp, loss_id

    def loss_scale(self) -> float:
        assert self._amp.scaler is not None
        return self._amp.scaler.get_scale(self._amp.key(self._loss_id))

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()


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

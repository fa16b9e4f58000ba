"""A scale found before the first step, on a batch that is not used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import MisuseError
from ._retry import Parameters, Replay, total

if TYPE_CHECKING:
    from ._scaler import GradScaler

_PASSES = 160  # a rule that halves gets from 2^126 to 2^-24 in 150


def calibrate(
    scaler: GradScaler, closure: Callable[[], Any], model: torch.nn.Module, key: str | None
) -> float:
    """Backward passes over one batch until the rule keeps its scale; everything is put back."""
    params = list(model.parameters())
    kept, looked_at = Replay(model, Parameters([])), Parameters(params)
    for _ in range(_PASSES):
        for p in params:
            p.grad = None
        try:
            loss = total(closure())
            scaler.scale(loss, key=key).backward()
            track = scaler._track(key, loss.device)
            window = track.inspect(track.window(looked_at))
            reading, before = window.reading, track.numbers()
            assert reading is not None
            bad, dead = bool(reading.nonfinite), bool(reading.loss_nonfinite)
            if not dead:
                track.advance(track.combined(), retry=True)
            track.clear()
        finally:
            kept.restore()
        after = track.numbers()
        if dead:
            raise MisuseError(
                f"calibrate() was given a batch whose loss is {float(loss.detach().sum())}: no "
                "scale can be found with it; give it another batch"
            )
        if not reading.checked:
            raise MisuseError(
                "calibrate() found no gradients on model=: pass the model that the loss was "
                "computed with"
            )
        if after.scale == before.scale:
            if bad:
                raise MisuseError(
                    f"gradients are not finite even at scale {after.scale:g}, though the loss is: "
                    "look for inf or NaN in the backward pass of this batch"
                )
            break
    return float(after.scale)

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
    if any(track.calls or track.windows for track in scaler._tracks.values()):
        raise MisuseError(
            "calibrate() was called between scale() and update(): gradients of two scales would "
            "mix; call it before the first scale() of a step"
        )
    params = list(model.parameters())
    kept, looked_at = Replay(model), Parameters(params)
    held = [p.grad for p in params]
    sound = 0
    for _ in range(_PASSES):
        try:
            for p in params:
                p.grad = None
            loss = total(closure())
            scaler.scale(loss, key=key).backward()
            track = scaler._track(key, loss.device)
            reading = track.inspect(track.window(looked_at)).reading
            assert reading is not None
            before, bad = track.numbers(), bool(reading.nonfinite)
            _refuse(reading, loss)
            track.advance(track.combined(), retry=True)
        finally:
            kept.restore()
            for p, grad in zip(params, held):
                p.grad = grad
            for track in scaler._tracks.values():
                track.clear()
        after = track.numbers()
        if bad and after.scale == before.scale:
            raise MisuseError(
                f"gradients are not finite even at scale {after.scale:g}, though the loss is: look "
                "for inf or NaN in the backward pass of this batch"
            )
        sound += not bad
        if not bad and (after.scale == before.scale or sound > 1):
            if after.scale > before.scale:  # not tried on this batch
                track.put(after._replace(scale=before.scale))
            break
    return float(track.numbers().scale)


def _refuse(reading: Any, loss: torch.Tensor) -> None:
    """What no scale can be found with."""
    if reading.loss_nonfinite:
        raise MisuseError(
            f"calibrate() was given a batch whose loss is {float(loss.detach().sum())}: no scale "
            "can be found with it; give it another batch"
        )
    if not reading.checked:
        raise MisuseError(
            "calibrate() found no gradients on model=: pass the model that the loss was computed "
            "with"
        )

"""PyTorch below Keras: eager, so a step is decided in Python numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core import (
    HALF_LOSS_CEILING,
    Cause,
    cause_of,
    loss_blamed,
    loss_level,
    moved,
)
from ...reading import Reading
from ...torch.scaler.finite_check import device_look, kind_of, look
from ..step_record import (
    NO_GRADIENTS,
    ROWS,
    RowReading,
    StepRow,
    Values,
    counts_of,
    memory_of,
    state_of,
)


class KerasTorchWindow:
    """What is known of the losses, and of gradients unscaled by hand, since the last step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.losses: list[Tensor] = []
        self.inspection: RowReading | None = None

    def note(self, loss: Tensor) -> None:
        """What was unscaled before this loss is not of this step."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        self.losses.append(loss.detach().sum(dtype=wide))
        self.inspection = None

    def unscaled(self, inspection: RowReading) -> None:
        """Gradients were unscaled by hand, and this is what they showed before."""
        self.inspection = inspection


new_window = KerasTorchWindow


def readable(value: Any) -> bool:
    """Can it be read now, or is this a trace?"""
    return True


def number(value: Any) -> Any:
    """A variable's value, as a step computes with it."""
    return float(value)


def read(grads: list[Tensor], inverse: float, amax: bool) -> tuple[bool, float, float]:
    """Is a gradient not finite? The largest |g|, and the true norm."""
    if not grads:
        return False, 0.0, 0.0
    if all(g.device.type == "cpu" for g in grads):
        seen = look(grads, inverse, amax=amax)
        return seen.nonfinite, seen.amax if amax else math.nan, seen.norm
    factor = torch.tensor(inverse, device=grads[0].device)
    seen = device_look(grads, factor, norm=True, amax=amax)
    nonfinite, norm, top = torch.stack(
        [seen.nonfinite.float(), seen.norm, seen.amax if amax else seen.norm]
    ).tolist()
    return bool(nonfinite), top if amax else math.nan, math.nan if nonfinite else norm


def first_bad(grads: list[tuple[int, Tensor]], inverse: float) -> int:
    """The last variable with a bad gradient is the first that backward made so."""
    for index, g in reversed(grads):
        if kind := kind_of(g) or kind_of((g * inverse).float()):  # leaves float32 on the way
            return -(index + 1) if kind == "nan" else index + 1
    return 0


def inspect(
    grads: list[tuple[int, Tensor]],
    overwriting: list[tuple[int, Tensor]],
    used: float,
    factor: float,
    amax: bool,
) -> RowReading:
    """What gradients show that carry `factor`, of a loss that carried `used`, and `overwriting`,
    which carries no factor."""
    nonfinite, top, norm = read([g for _, g in grads], 1 / factor, amax)
    culprit = first_bad(grads, 1 / factor) if nonfinite else 0
    if read([g for _, g in overwriting], 1.0, False)[0]:
        nonfinite, culprit = True, max(culprit, first_bad(overwriting, 1.0), key=abs)
    return RowReading(nonfinite, top * (used / factor), norm, culprit)


def unscaled(g: Tensor, inverse: float) -> Tensor:
    return g.float() * inverse if g.dtype in (torch.float16, torch.bfloat16) else g * inverse


@torch.no_grad()
def apply(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """One step: inspect, decide, apply or leave everything as it is, move the scale."""
    rule, window = opt.rule, opt._window
    held = Values(*(v.value for v in opt._kept))
    known = Values(held.scale.item(), held.clean.item(), held.history.tolist(), None)
    state = state_of(known)
    used = opt._carried(state.scale)
    state = state._replace(scale=used)
    losses = [float(loss) for loss in window.losses]
    bad = [not math.isfinite(loss) for loss in losses]
    marked, overwriting = opt._indexed(grads, variables)
    anything = bool(marked or overwriting)
    factor = used if window.inspection is None else 1.0
    reading, culprit = NO_GRADIENTS, 0
    if anything:
        seen = inspect(marked, overwriting, used, factor, opt._wants_amax)
        if window.inspection is not None:
            seen = window.inspection.after_clipping(seen, lambda c, a, b: a if c else b)
        blamed = loss_blamed(loss_level(bad), seen.nonfinite)
        reading, culprit = Reading(seen.nonfinite, seen.amax, blamed, norm=seen.norm), seen.culprit
    cause = Cause(cause_of(reading, state, rule, loss_known=bool(losses)))
    if cause is Cause.NONE:
        if factor != 1:
            grads = opt._mapped(lambda g: unscaled(g, 1 / factor), grads, variables)
        opt.inner_optimizer.apply(grads, variables)
    elif opt.drop == "window" and anything:
        opt._forget_window()
    ceiling = HALF_LOSS_CEILING if opt._loss_is_half else math.inf
    after = moved(rule, state, reading, ceiling=ceiling)
    row = StepRow(
        used,
        after.scale,
        reading.amax,
        reading.norm,
        sum(losses) if losses else math.nan,
        int(cause),
        reading.nonfinite,
        culprit,
        state.skips,
        opt._loss_is_half,
        bad.index(True) + 1 if len(bad) > 1 and any(bad) else 0,
    )
    counts = counts_of(known.history)
    ring = held.ring.clone()
    ring[sum(counts) % ROWS] = torch.tensor(row, dtype=torch.float32)
    counts = [n + (i == cause) for i, n in enumerate(counts)]
    new = Values(after.scale, after.clean, [*memory_of(after), *counts], ring)
    for variable, value in zip(opt._kept, new):
        variable.assign(value)
    window.clear()

"""PyTorch below Keras: eager, so a step is decided in Python numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..reading import Reading
from ..torch._inspect import device_look, kind_of, look
from ..verdict import Cause, cause_of
from ._record import ROWS, Row, Seen, Values, counts_of, memory_of, state_of


class Window:
    """What is known of the losses, and of gradients unscaled by hand, since the last step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.losses = 0
        self.total: Any = 0.0
        self.dead: Any = 0
        self.seen: Seen | None = None

    def note(self, loss: Tensor) -> None:
        """What was unscaled before this loss is not of this step."""
        here = loss.detach().sum(dtype=torch.promote_types(loss.dtype, torch.float32))
        self.total = self.total + here
        self.dead = self.dead + (~torch.isfinite(here)).int()
        self.losses += 1
        self.seen = None

    def unscaled(self, seen: Seen) -> None:
        """Gradients were unscaled by hand, and this is what they showed before."""
        self.seen = seen

    def blames_loss(self, nonfinite: bool) -> bool:
        """Of some losses that were dead and some that were not, only if the gradients show it."""
        dead = int(self.dead)
        return dead > 0 and (dead == self.losses or nonfinite)


def readable(value: Any) -> bool:
    """Can it be read now, or is this a trace?"""
    return True


def number(value: Any) -> Any:
    """A variable's value, as a step computes with it."""
    return float(value)


def read(grads: list[Tensor], inverse: float, amax: bool) -> tuple[bool, float, float]:
    """Is a gradient not finite? The largest |g|, and the true norm."""
    if all(g.device.type == "cpu" for g in grads):
        seen = look(grads, inverse, amax=amax)
        return seen.nonfinite, seen.amax if amax else math.nan, seen.norm
    factor = torch.tensor(inverse, device=grads[0].device)
    seen = device_look(grads, factor, norm=True, amax=amax)
    nonfinite, norm, top = torch.stack(
        [seen.nonfinite.float(), seen.norm, seen.amax if amax else seen.norm]
    ).tolist()
    return bool(nonfinite), top if amax else math.nan, math.nan if nonfinite else norm


def first_bad(grads: list[tuple[int, Tensor]]) -> int:
    """The last variable with a bad gradient is the first that backward made so."""
    for index, g in reversed(grads):
        if kind := kind_of(g):
            return -(index + 1) if kind == "nan" else index + 1
    return 0


def see(grads: list[tuple[int, Tensor]], used: float, factor: float, amax: bool) -> Seen:
    """A look at gradients that carry `factor`, of a loss that carried `used`."""
    nonfinite, top, norm = read([g for _, g in grads], 1 / factor, amax)
    return Seen(nonfinite, top * (used / factor), norm, first_bad(grads) if nonfinite else 0)


def unscaled(g: Tensor, inverse: float) -> Tensor:
    return g.float() * inverse if g.dtype in (torch.float16, torch.bfloat16) else g * inverse


@torch.no_grad()
def apply(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """One step: read, decide, apply or leave everything as it is, advance."""
    rule, window = opt.rule, opt._window
    held = Values(*(v.value for v in opt._kept))
    known = Values(held.scale.item(), held.clean.item(), held.history.tolist(), None)
    state = state_of(known)
    used = opt._carried(state.scale)
    state = state._replace(scale=used)
    marked = opt._indexed(grads, variables)
    factor = used if window.seen is None else 1.0
    loss = float(window.total) if window.losses else math.nan
    reading, culprit = Reading(nonfinite=False, amax=0.0, checked=bool(marked)), 0
    if marked:
        seen = see(marked, used, factor, opt._wants_amax)
        if window.seen is not None:
            seen = window.seen.but(seen, lambda c, a, b: a if c else b)
        dead, culprit = window.blames_loss(seen.nonfinite), seen.culprit
        reading = Reading(seen.nonfinite, seen.amax, dead, norm=seen.norm)
    cause = Cause(cause_of(reading, state, rule, loss_known=bool(window.losses)))
    if cause is Cause.NONE:
        if factor != 1:
            grads = opt._mapped(lambda g: unscaled(g, 1 / factor), grads, variables)
        opt.inner_optimizer.apply(grads, variables)
    elif opt.drop == "window" and marked:
        opt._forget_window()
    after = rule.advance(state, reading)
    if cause is Cause.NO_GRADIENTS:
        after = after._replace(scale=known.scale)
    counts = counts_of(known.history)
    numbers = used, after.scale, reading.amax, reading.norm, loss
    row = Row(*numbers, int(cause), culprit, after.skips)
    ring = held.ring.clone()
    ring[sum(counts) % ROWS] = torch.tensor(row, dtype=torch.float32)
    counts = [n + (i == cause) for i, n in enumerate(counts)]
    new = Values(after.scale, after.clean, [*memory_of(after), *counts], ring)
    for variable, value in zip(opt._kept, new):
        variable.assign(value)
    window.clear()

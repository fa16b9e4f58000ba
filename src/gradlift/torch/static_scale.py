"""Which static scale fits a model, from a few live batches."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import MisuseError, SettingsError
from ..formats import Format, find
from ..reading import Reading
from ..rules.static_choice import FORMATS, MARGIN_BITS, Advice, choose
from .gradient_source import PlainGradients
from .names import named
from .probing import ModuleProbe
from .ranks.sharding import distributed
from .scaler.finite_check import look
from .scaler.retrying import Parameters, total, without_trace
from .scaler.statistics import statistics


def find_scale(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[torch.nn.Module, Any], Any],
    formats: Sequence[Format | str] = FORMATS,
    margin_bits: int = MARGIN_BITS,
) -> Advice:
    """The table of `gradlift find-scale`: what each format would lose at each static scale.

    `loss_fn(model, batch)` returns the loss; it is differentiated once a batch, without a scale. Do
    it in float32: what float16 flushes to zero cannot be counted. No weight moves; gradients,
    buffers and random states are put back. `margin_bits` is the room left above the largest
    gradient; the recommendation is for the first of `formats`.

    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> batches = [torch.full((2, 4), 2.0**-20)]
    >>> advice = find_scale(model, batches, lambda model, x: model(x).mean())
    >>> advice.verdict, advice.scale == 2.0**32
    ('static', True)
    """
    chosen = [f if isinstance(f, Format) else find(f) for f in formats]
    if not chosen:
        raise SettingsError("formats is empty, expected one at least, such as ['fp16']")
    if isinstance(margin_bits, bool) or not isinstance(margin_bits, int) or margin_bits < 0:
        raise SettingsError(f"margin_bits is {margin_bits!r}, expected a whole number, 0 or more")
    params, names = list(model.parameters()), named(model)
    gradients, probe = PlainGradients(Parameters(params)), ModuleProbe(model, every=1)
    losses: list[float] = []
    samples: list[Counter[int]] = []
    peaks: list[float] = []
    elements = zeros = 0
    with without_trace(model), contextlib.ExitStack() as cleanup:
        cleanup.callback(probe.remove)
        for batch in batches:
            for p in params:
                p.grad = None
            loss = total(loss_fn(model, batch))
            if loss.requires_grad:
                loss.backward()
            found, _, grads = gradients.find(spread=distributed())
            if not grads:
                raise MisuseError(
                    "find_scale() found no gradients on model: its parameters are frozen, or the "
                    "loss does not depend on them"
                )
            seen = look([g.detach().cpu() for g in grads], 1.0, amax=True)
            top = float(probe.peak())
            probe.ended(Reading(seen.nonfinite, seen.amax), 1.0)
            losses.append(float(loss.detach().sum()))
            if bool(seen.nonfinite) or not bool(torch.isfinite(loss.detach()).all()):
                continue
            peaks.append(max(seen.amax, top if top < math.inf else 0.0))
            samples.append(Counter())
            for shares in statistics(found, grads, names).values():
                samples[-1].update(shares["exponents"])
                elements += shares["elements"]
                zeros += round(shares["zero"] * shares["elements"])
    if not losses:
        raise MisuseError("find_scale() was given no batches: pass a list of a few")
    if not samples:
        shown = ", ".join(f"{loss:g}" for loss in losses[:4])
        why = f"No batch gave finite gradients (losses: {shown}): no static scale mends that."
        return Advice("unknown", None, why)
    zero = zeros / elements if elements else math.nan
    return choose(samples, peaks, formats=chosen, margin_bits=margin_bits, zero=zero)

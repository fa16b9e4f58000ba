"""Which static scale fits a model, from a few live batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._find_scale import FORMATS, Advice
from .._find_scale import find_scale as advise
from ..errors import MisuseError, SettingsError
from ..formats import Format, find
from ..journal import Run, Sample, Step
from ..reading import Reading
from ._inspect import collect, look
from ._names import named
from ._probe import Probe
from ._retry import Parameters, Replay, total
from ._statistics import statistics


def find_scale(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[torch.nn.Module, Any], Any],
    formats: Sequence[Format | str] = FORMATS,
    margin_bits: int = 1,
) -> Advice:
    """The table of `gradlift find-scale`: what each format would lose at each static scale.

    `loss_fn(model, batch)` returns the loss; it is differentiated once a batch, without a scale. Do
    it in float32: what float16 flushes to zero cannot be counted. No weight moves; gradients,
    buffers and random states are put back. `margin_bits` is the room left above the largest
    gradient; the recommendation is for the first of `formats`.

    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> batches = [torch.full((2, 4), 2.0**-20)]
    >>> advice = find_scale(model, batches, lambda model, x: model(x).mean())
    >>> advice.verdict, advice.scale == 2.0**34
    ('static', True)
    """
    chosen = [f if isinstance(f, Format) else find(f) for f in formats]
    if not chosen:
        raise SettingsError("formats is empty, expected one at least, such as ['fp16']")
    if isinstance(margin_bits, bool) or not isinstance(margin_bits, int) or margin_bits < 0:
        raise SettingsError(f"margin_bits is {margin_bits!r}, expected a whole number, 0 or more")
    params, names = list(model.parameters()), named(model)
    kept, looked_at = Replay(model), Parameters(params)
    held = [p.grad for p in params]
    run, probe = Run(), Probe(model, every=1)
    try:
        for i, batch in enumerate(batches):
            for p in params:
                p.grad = None
            loss = total(loss_fn(model, batch))
            if loss.requires_grad:
                loss.backward()
            found, _, grads = collect(looked_at, True)
            if not grads:
                raise MisuseError(
                    "find_scale() found no gradients on model: its parameters are frozen, or the "
                    "loss does not depend on them"
                )
            seen = look([g.detach().cpu() for g in grads], 1.0, amax=True)
            top = float(probe.peak())
            probe.ended(Reading(seen.nonfinite, seen.amax), 1.0)
            bad = bool(seen.nonfinite) or not bool(torch.isfinite(loss.detach()).all())
            step = Step(i, 1.0, 1.0, seen.amax, bad, float(loss.detach().sum()), probe_amax=top)
            run.steps.append(step)
            if not bad:
                run.samples.append(Sample(i, statistics(found, grads, names)))
    finally:
        probe.remove()
        kept.restore()
        for p, grad in zip(params, held):
            p.grad = grad
    if not run.steps:
        raise MisuseError("find_scale() was given no batches: pass a list of a few")
    if not run.samples:
        losses = ", ".join(f"{s.loss:g}" for s in run.steps[:4])
        why = f"No batch gave finite gradients (losses: {losses}): no static scale mends that."
        return Advice("unknown", None, why, zero=math.nan)
    return advise(run, formats=chosen, margin_bits=margin_bits)

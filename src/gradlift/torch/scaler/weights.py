"""Notes about the weights after a step: not finite, or at the end of their format's range."""

from __future__ import annotations

import math

import torch

from ...core import Cause, Finished, weights_held, weights_nonfinite
from ..gradient_source import GradientSource
from ..names import name_of, nonfinite_weights
from .window import APPLIED


def about_weights(finished: Finished, source: GradientSource, names: dict[int, str]) -> Finished:
    """A bad step with weights that are not finite themselves has a note that names them; an
    applied one whose masters left their 16-bit weights' range has the cause WEIGHT_RANGE.

    Reads all weights: not called while all is well.
    """
    if finished.cause is Cause.NO_GRADIENTS:  # what the step before has left in the optimizer
        return finished
    if finished.cause in APPLIED:
        held = source.at_limit()  # on a device one step later: they may have come back since
        said = [name_of(p, names) for p in held] or ["a parameter"]
        largest = float(torch.finfo(held[0].dtype).max) if held else math.nan
        return weights_held(finished, said, largest)
    params = [p for group in source.optimizer.param_groups for p in group["params"]]
    bad = nonfinite_weights(source.weights(), params, names)
    if not bad:
        return finished
    return finished._replace(notes=(*finished.notes, weights_nonfinite(bad)))

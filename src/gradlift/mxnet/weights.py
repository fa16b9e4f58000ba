"""Weights after a step: float16 ones that left their range, and those that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from mxnet import autograd, nd

from ..core import Culprit, Note, weights_nonfinite
from ..formats import FP16


def hold_in_range(trainer: Any) -> list[str]:
    """float16 weights whose float32 masters lie beyond 65504 stay there: the names of those that
    MXNet's kernels had made infinite."""
    if not trainer._optimizer.multi_precision:
        return []
    half = [p for p in _trained(trainer) if np.dtype(p.dtype) == np.float16]
    held = []
    with autograd.pause():
        for p in half:
            for weight in _arrays(p):
                if np.isinf(weight.asnumpy()).any():
                    nd.clip(weight, -FP16.max, FP16.max, out=weight)
                    held.append(p.name)
    return list(dict.fromkeys(held))


def about_weights(trainer: Any) -> list[Note]:
    """After a bad step: a note if the weights themselves are not finite."""
    bad = []
    for p in _trained(trainer):
        values = [weight.asnumpy() for weight in _arrays(p)]
        if not all(np.isfinite(v).all() for v in values):
            bad.append(Culprit(p.name, "nan" if any(np.isnan(v).any() for v in values) else "inf"))
    return [weights_nonfinite(bad)] if bad else []


def _trained(trainer: Any) -> list[Any]:
    return [p for p in trainer._params if p.grad_req != "null"]


def _arrays(p: Any) -> list[Any]:
    """A parameter's weights on each device; a sparse one is MXNet's alone."""
    if p._stype != "default":
        return []
    return [w.as_nd_ndarray() if hasattr(w, "as_nd_ndarray") else w for w in p.list_data()]

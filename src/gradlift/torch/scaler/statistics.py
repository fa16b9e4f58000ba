"""What a gradient looks like in float16: shares and histograms, made here only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import FP16
from ..names import name_of


def describe(gradient: Tensor) -> dict[str, Any]:
    """Shares of a scaled gradient that are zero, subnormal, near FP16's top; counts by exponent.

    >>> shares = describe(torch.tensor([0.0, 2.0**-20, 1.0, 40000.0]))
    >>> shares["zero"], shares["subnormal"], shares["near_max"], shares["exponents"]
    (0.25, 0.25, 0.25, {-20: 1, 0: 1, 15: 1})
    """
    g = gradient.detach().float().abs().flatten()
    n = max(1, g.numel())
    fields = torch.bincount(g.view(torch.int32) >> 23, minlength=256).tolist()  # sign bit is clear
    counts = {field - 127: c for field, c in enumerate(fields) if c and 0 < field < 255}
    zero = int((g == 0).sum())
    return {
        "elements": g.numel(),
        "zero": zero / n,
        "subnormal": FP16.shares(counts, n).subnormal,
        "near_max": int((g > FP16.max / 8).sum()) / n,
        "exponents": counts,
    }


def statistics(
    params: list[Tensor], grads: list[Tensor], names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """`describe` for each parameter, by name."""
    return {name_of(p, names): describe(g) for p, g in zip(params, grads, strict=True)}

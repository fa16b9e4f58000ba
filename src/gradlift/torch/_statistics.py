"""What a gradient looks like in a narrow format: shares and histograms, made here only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import FP16, Format
from ._names import name_of


def describe(gradient: Tensor, format: Format = FP16) -> dict[str, Any]:
    """Shares of a scaled gradient that are zero, subnormal, near the top; counts by exponent.

    >>> shares = describe(torch.tensor([0.0, 2.0**-20, 1.0, 40000.0]))
    >>> shares["zero"], shares["subnormal"], shares["near_max"], shares["exponents"]
    (0.25, 0.25, 0.25, {-20: 1, 0: 1, 15: 1})
    """
    g = gradient.detach().float().abs()
    n = max(1, g.numel())
    exponents = (g.view(torch.int32) >> 23) - 127  # of |g|, so the sign bit is clear
    usual = exponents[(exponents > -127) & (exponents < 128)]
    values, counts = torch.unique(usual, return_counts=True)
    return {
        "elements": g.numel(),
        "zero": int((g == 0).sum()) / n,
        "subnormal": int(((g > 0) & (g < format.smallest_normal)).sum()) / n,
        "near_max": int((g > format.max / 8).sum()) / n,
        "exponents": dict(zip(values.tolist(), counts.tolist(), strict=True)),
    }


def statistics(
    params: list[Tensor], grads: list[Tensor], names: Mapping[int, str], format: Format = FP16
) -> dict[str, dict[str, Any]]:
    """`describe` for each parameter, by name."""
    return {name_of(p, names): describe(g, format) for p, g in zip(params, grads, strict=True)}

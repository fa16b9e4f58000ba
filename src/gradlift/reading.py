"""What was measured on the gradients of one window."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

NAN = math.nan


class Reading(NamedTuple):
    """What was measured on the *scaled* gradients; each field a Python scalar or a 0-d array.

    >>> print(Reading(nonfinite=False, amax=1024.0, norm=0.5))
    finite, amax 2^10.0, norm 0.5
    >>> print(Reading(nonfinite=True, amax=3.0, loss_nonfinite=True))
    non-finite (so was the loss), amax 2^1.6
    """

    nonfinite: Any
    """Was any gradient inf or NaN?"""
    amax: Any
    """Largest finite |gradient|, as scaled; inf where nothing finite is known."""
    loss_nonfinite: Any = False
    """Was the loss inf or NaN before it was scaled? Then the scale is not the cause."""
    checked: Any = True
    """Was there any gradient?"""
    norm: Any = NAN
    """Norm of the unscaled gradients; NaN if it was not measured."""
    probe_amax: Any = NAN
    """Largest |gradient| between modules, as scaled; inf if not finite, NaN if not probed."""

    def __str__(self) -> str:
        if not self.checked:
            return "no gradients"
        text = "non-finite" if self.nonfinite else "finite"
        if self.loss_nonfinite:
            text += " (so was the loss)"
        amax, norm = float(self.amax), float(self.norm)
        if 0 < amax < math.inf:
            text += f", amax 2^{math.log2(amax):.1f}"
        elif amax == 0:
            text += ", amax 0"
        return text if math.isnan(norm) else f"{text}, norm {norm:.4g}"

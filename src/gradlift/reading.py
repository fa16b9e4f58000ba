"""What one backward pass showed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

NAN = math.nan


class Reading(NamedTuple):
    """What one look at the *scaled* gradients showed; each field a Python scalar or a 0-d array.

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
    """Was the loss inf or NaN before it was scaled? Then the scale is not to blame."""
    checked: Any = True
    """Was there any gradient to look at?"""
    norm: Any = NAN
    """Norm of the gradients with the scale taken out, NaN if not taken."""
    near_max_share: Any = NAN
    """Share of elements above an eighth of the format's largest number, NaN if not taken."""
    probe_amax: Any = NAN
    """Largest |gradient| that flowed between modules; inf if not finite, NaN if not probed."""

    def __str__(self) -> str:
        if not self.checked:
            return "no gradients"
        said = "non-finite" if self.nonfinite else "finite"
        if self.loss_nonfinite:
            said += " (so was the loss)"
        amax, norm = float(self.amax), float(self.norm)
        if 0 < amax < math.inf:
            said += f", amax 2^{math.log2(amax):.1f}"
        elif amax == 0:
            said += ", amax 0"
        return said if math.isnan(norm) else f"{said}, norm {norm:.4g}"

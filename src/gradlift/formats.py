"""Number formats: a few facts each, from which every limit is derived.

>>> from gradlift.formats import FP16
>>> FP16.max, FP16.smallest_normal == 2**-14, FP16.smallest_subnormal == 2**-24
(65504.0, True, True)
>>> FP16.flushes(1e-8), FP16.flushes(1e-8 * 2**10), FP16.overflows(70000.0)
(True, False, True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import SettingsError


class Shares(NamedTuple):
    """Shares of elements that a format flushes to zero, holds as subnormal, or overflows."""

    flushed: float
    subnormal: float
    overflowed: float


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `has_infinity=False` is the FP8 convention: the topmost exponent holds ordinary numbers, and
    only its all-ones mantissa is NaN.

    >>> Format("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, has_infinity=False).max
    448.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        """Width in bits, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number: FP16's 65504 lies in binade 15."""
        return (1 << self.exponent_bits) - (2 if self.has_infinity else 1) - self.bias

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def flushed_below(self) -> int:
        """Numbers with an exponent below this one are all rounded to zero.

        In the binade just below the smallest subnormal number only the lower end, a tie, is rounded
        to zero; the other numbers are rounded up.

        >>> FP16.flushed_below
        -25
        """
        return self.min_exponent - self.mantissa_bits - 1

    @property
    def max(self) -> float:
        """Largest finite number."""
        last_steps = 1 if self.has_infinity else 2  # all-ones mantissa at the top is NaN in FP8
        return float(2.0**self.max_exponent * (2 - last_steps * self.eps))

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number."""
        return float(2.0**-self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Smaller numbers are held with fewer bits."""
        return float(2.0**self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero."""
        return self.smallest_normal * self.eps

    def flushes(self, x: Any) -> Any:
        """True where a non-zero `x` (a float or an array) would be rounded to zero.

        >>> FP16.flushes(2.0**-25), FP16.flushes(2.0**-24), FP16.flushes(0.0)
        (True, False, False)
        """
        return (x != 0) & (abs(x) <= self.smallest_subnormal / 2)  # the tie goes to even: zero

    def overflows(self, x: Any) -> Any:
        """True where `x` (a float or an array) would be rounded to infinity (or FP8's NaN).

        >>> FP16.overflows(65519.0), FP16.overflows(65520.0)
        (False, True)
        """
        halfway = self.max + 2.0 ** (self.max_exponent - 1) * self.eps
        # A tie goes to the even mantissa: beyond the range in IEEE formats, back to max in FP8.
        return abs(x) >= halfway if self.has_infinity else abs(x) > halfway

    def headroom(self, x: float) -> float:
        """Bits between |x| and the largest number; NaN for 0, inf and NaN.

        >>> FP16.headroom(65504 / 4)
        2.0
        """
        return math.log2(self.max / abs(x)) if 0 < abs(x) < math.inf else math.nan

    def shares(
        self, counts: Mapping[int, int], elements: int | None = None, shift: int = 0
    ) -> Shares:
        """Shares of elements counted by exponent, floor(log2|x|), after multiplication by 2^shift.

        Shares are of `elements`, or of those counted. Numbers above the largest one, but in its
        binade, count as held: the exponent does not distinguish them.

        >>> FP16.shares({-30: 1, -24: 1, 0: 1, 16: 1})
        Shares(flushed=0.25, subnormal=0.25, overflowed=0.25)
        """
        flushed = subnormal = overflowed = 0
        flushed_below, min_exponent = self.flushed_below - shift, self.min_exponent - shift
        max_exponent = self.max_exponent - shift
        for exponent, n in counts.items():
            if exponent < flushed_below:
                flushed += n
            elif exponent < min_exponent:
                subnormal += n
            elif exponent > max_exponent:
                overflowed += n
        whole = max(1, sum(counts.values()) if elements is None else elements)
        return Shares(flushed / whole, subnormal / whole, overflowed / whole)

    def __str__(self) -> str:
        return self.name.lower()


FP16 = Format("FP16", exponent_bits=5, mantissa_bits=10, bias=15)
BF16 = Format("BF16", exponent_bits=8, mantissa_bits=7, bias=127)
FP32 = Format("FP32", exponent_bits=8, mantissa_bits=23, bias=127)
FP64 = Format("FP64", exponent_bits=11, mantissa_bits=52, bias=1023)
E4M3 = Format("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, has_infinity=False)
E5M2 = Format("E5M2", exponent_bits=5, mantissa_bits=2, bias=15)

ALL = (FP64, FP32, BF16, FP16, E5M2, E4M3)


def find(name: str) -> Format:
    """The format called `name`, in any case; names such as `float16` work too.

    >>> find("float16") is FP16, find("e4m3") is E4M3
    (True, True)
    """
    wanted = name.lower().replace("bfloat", "bf").replace("float", "fp")
    for known in ALL:
        if str(known) == wanted:
            return known
    names = ", ".join(str(f) for f in ALL)
    raise SettingsError(f"no number format is called {name!r}; there are {names}")

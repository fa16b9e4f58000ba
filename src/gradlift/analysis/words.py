"""How every report and command writes a scale, a share, a time, a cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..core import Cause
from ..text import UNKNOWN as UNKNOWN
from ..text import percent as percent
from ..text import power as power

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """A time in a fitting unit.

    >>> duration(0.0000125), duration(0.0432), duration(7.25), duration(200), duration(9000)
    ('12.5 us', '43.2 ms', '7.25 s', '3 min 20 s', '2 h 30 min')
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def number(value: float, digits: int = 4) -> str:
    """A measured number, short.

    >>> number(3.14159), number(float("nan")), number(float("inf"))
    ('3.142', '-', 'inf')
    """
    return UNKNOWN if value != value else f"{value:.{digits}g}"


def bits(value: float) -> str:
    """A distance on the exponent scale.

    >>> bits(1.16), bits(float("nan"))
    ('1.2 bits', '-')
    """
    return UNKNOWN if value != value else f"{value:.1f} bits"


def count(n: int, thing: str, things: str = "") -> str:
    """A count with its noun, singular or plural.

    >>> count(1, "step"), count(1200000, "step"), count(2, "try", "tries")
    ('1 step', '1,200,000 steps', '2 tries')
    """
    return f"{n:,} {thing if n == 1 else things or thing + 's'}"


def counted(causes: Mapping[str, int]) -> str:
    """What occurred how often, the most frequent first.

    >>> counted({"floor": 1, "overflow": 3})
    '3 x overflow, 1 x floor'
    """
    by_count = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n:,} x {what}" for what, n in by_count)


def cause(name: object) -> str:
    """The cause that an event has by name, in words; any other text as it is.

    >>> cause("LOSS_NONFINITE"), cause("")
    ('loss non-finite', '')
    """
    return str(Cause[str(name)]) if str(name) in Cause.__members__ else str(name)


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks between their lowest and their highest. With more than `width` values each
    block is the lowest of a range of them. A blank is a value that is not finite.

    >>> sparkline((0.0, 1.0, 7.0, math.nan, 7.0), 5), sparkline((3.0, 3.0), 5)
    ('▁▂█ █', '▄▄')
    """
    cells = min(len(values), width)
    ends = [len(values) * i // cells for i in range(cells + 1)] if cells else []
    stretches = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(ends)]
    known = [min(stretch) for stretch in stretches if stretch]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        return "".join(_BLOCKS[3] if stretch else " " for stretch in stretches)
    return "".join(
        _BLOCKS[round((min(stretch) - low) / (high - low) * 7)] if stretch else " "
        for stretch in stretches
    )


def where(first: int | None, last: int | None) -> str:
    """A step, or a range of steps.

    >>> where(7, 7), where(7, 1200), where(None, None)
    ('7', '7 to 1,200', '-')
    """
    if first is None or last is None:
        return UNKNOWN
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"

"""The choice of a static scale from gradients counted by exponent; live and recorded ones share it.

lowest                                                         highest
|  flushed  |  subnormal  |            normal             |  overflow  |
                          <- gradients, times 2^k, should lie here ->
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

from ..formats import BF16, E4M3, E5M2, FP16, Format
from ..text import percent, power

FORMATS = (FP16, BF16, E4M3, E5M2)
MARGIN_BITS = 3  # a static scale is never lowered: room for gradients 8 times the largest seen
LOSES_LITTLE = 0.01  # share of elements below the normal numbers that does not change training
PHASES = 4  # a scale must fit each quarter of the samples, not their average
_MOST_BITS = 126  # of a scale: its inverse is a normal float32 number, too
_ROWS, _WIDTH = 16, 79  # of the table and the text: what fits a screen


class Effect(NamedTuple):
    """Shares of the non-zero gradient elements at one scale in one format, and of the steps."""

    flushed: float
    """Rounded to zero."""
    subnormal: float
    """Kept with fewer bits."""
    overflowed: float
    """Beyond the largest number."""
    steps: float
    """Share of the steps in which the largest element overflows; NaN if no peaks are known."""


class Candidate(NamedTuple):
    """A static scale, and its effect in each format, by name."""

    scale: float
    formats: dict[str, Effect]


class Advice(NamedTuple):
    """The recommended scale and why; as text, a table of the candidates and the recommendation."""

    verdict: str
    """"static": use `scale`; "none": the format needs no scale; "no single scale"; "unknown"."""
    scale: float | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    zero: float = math.nan
    """Share of the elements that were zero; which of them were flushed is not known."""

    def __str__(self) -> str:
        found = {
            "static": f"Use {power(self.scale or 1)}.",
            "none": "Use none.",
            "no single scale": "No single scale fits.",
            "unknown": "Not known.",
        }
        return "\n".join([*_table(self), found[self.verdict], fill(self.reason, _WIDTH)])


def choose(
    samples: Sequence[Mapping[int, int]],
    peaks: Sequence[float],
    *,
    formats: Sequence[Format] = FORMATS,
    margin_bits: int = MARGIN_BITS,
    zero: float = math.nan,
) -> Advice:
    """Candidate static scales with what each format would lose, and one recommendation, which is
    for the first format.

    `samples` count elements by the exponent of the true gradient, in the order of steps; `peaks`
    are the largest true gradients of single steps; `zero` is the share of elements that were zero.

    >>> advice = choose([{-20: 3, -16: 1}], [2.0**-16])
    >>> advice.verdict, advice.scale == 2.0**28
    ('static', True)
    """
    quarters = [
        samples[len(samples) * i // PHASES : len(samples) * (i + 1) // PHASES]
        for i in range(PHASES)
    ]
    phases = [phase for phase in map(_summed, quarters) if phase]
    if not phases:
        return Advice("unknown", None, "Every gradient element was zero.", zero=zero)
    everything, peaks = _summed(phases), sorted(peaks)
    highest = max([max(everything), *[math.frexp(p)[1] - 1 for p in peaks[-1:]]])
    wanted = formats[0]
    all_normal = wanted.min_exponent - min(everything)
    all_fit = wanted.max_exponent - highest
    low, high = min(0, all_fit - margin_bits), max(0, all_normal, all_fit + 1)
    ks = range(max(low, -_MOST_BITS), min(high, _MOST_BITS) + 1)
    candidates = tuple(
        Candidate(2.0**k, {f.name: _effect(everything, peaks, k, f) for f in formats}) for k in ks
    )
    verdict, scale, reason = _recommended(phases, highest, wanted, margin_bits)
    if zero >= 0.5:
        reason += (
            f" {_percent(zero)} of the elements were zero. If they were flushed, a recording of a "
            "float32 run shows their size."
        )
    return Advice(verdict, scale, reason, candidates, zero)


def _summed(samples: Sequence[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counts in samples:
        total.update(counts)
    return total


def _recommended(
    phases: Sequence[Mapping[int, int]], highest: int, format: Format, margin_bits: int
) -> tuple[str, float | None, str]:
    """No scale if the format loses little without one, else the largest that is safe."""

    def lost(k: int) -> float:
        shares = [format.shares(phase, shift=k) for phase in phases]
        return max(s.flushed + s.subnormal for s in shares)

    safe = format.max_exponent - highest - margin_bits
    safe = min(max(safe, -_MOST_BITS), _MOST_BITS)
    below = f"of the elements fall below {format.name}'s normal numbers"
    top = f"The largest gradient lies just below 2^{highest + 1}"
    if safe >= 0 and lost(0) <= LOSES_LITTLE:
        return (
            "none",
            1.0,
            f"{top}, and without any scale {_percent(lost(0))} {below}: you need none.",
        )
    if lost(safe) <= LOSES_LITTLE:
        return (
            "static",
            2.0**safe,
            f"{top}; 2^{safe} leaves {margin_bits} bit{'s' * (margin_bits != 1)} above it, and "
            f"{_percent(lost(safe))} {below} (without a scale: {_percent(lost(0))}).",
        )
    return (
        "no single scale",
        None,
        f"{top}, so 2^{safe} is as much as is safe, and there {_percent(lost(safe))} {below} in "
        'some part of the run: no single scale fits. Use rule="auto", which follows the gradients; '
        "lift the smallest layers (gradlift.torch.layerwise) or keep them in float32; or use "
        "bfloat16.",
    )


def _effect(counts: Mapping[int, int], peaks: Sequence[float], k: int, format: Format) -> Effect:
    """What `format` makes of the elements times 2^k; `peaks` are sorted."""
    fitting = bisect_left(peaks, True, key=lambda peak: bool(format.overflows(peak * 2.0**k)))
    steps = 1 - fitting / len(peaks) if peaks else math.nan
    return Effect(*format.shares(counts, shift=k), steps)


def _table(advice: Advice) -> list[str]:
    """One line a scale; the recommended one is marked."""
    if not advice.candidates:
        return []
    names = list(advice.candidates[0].formats)
    rows = [["scale", *names, "steps"]]
    for candidate in _thinned(advice):
        cells = ["/".join(map(_cell, candidate.formats[name][:3])) for name in names]
        mark = " <-" if candidate.scale == advice.scale else ""
        steps = _cell(candidate.formats[names[0]].steps)
        rows.append([power(candidate.scale), *cells, steps + mark])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    legend = (
        "Per cent of the elements flushed/subnormal/overflowed; steps: per cent of the steps that "
        f"would overflow in {names[0]}."
    )
    return [*lines, "", fill(legend, _WIDTH), ""]


def _thinned(advice: Advice) -> list[Candidate]:
    """Every n-th scale, counted from the recommended one, so that it is among them."""
    every = math.ceil(len(advice.candidates) / _ROWS)
    scales = [c.scale for c in advice.candidates]
    start = scales.index(advice.scale) % every if advice.scale in scales else 0
    return list(advice.candidates[start::every])


def _percent(share: float) -> str:
    """In one word, which a line is not broken in."""
    return percent(share).replace(" %", "%")


def _cell(share: float) -> str:
    """Per cent, as short as a cell of the table must be.

    >>> _cell(0.0), _cell(0.00001), _cell(0.123), _cell(1.0)
    ('0', '<.1', '12.3', '100')
    """
    if math.isnan(share):
        return "-"
    if share in (0, 1):
        return f"{100 * share:.0f}"
    return f"{100 * share:.1f}" if share >= 0.001 else "<.1"

"""Which static scale would have fitted a recorded run, in which format; or none, or no single one.

lowest                                                         highest
|  flushed  |  subnormal  |            normal             |  overflow  |
                          <- gradients, times 2^k, should lie here ->
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from ._words import power
from .formats import BF16, E4M3, E5M2, FP16, Format
from .journal import Run, read_journal
from .verdict import Verdict

FORMATS = (FP16, BF16, E4M3, E5M2)
MARGIN_BITS = 3  # a static scale cannot yield: room for gradients eight times the largest seen
LOSES_LITTLE = 0.01  # share of elements below the normal numbers that does not change training
LOOKED_AT = 200  # samples, evenly spread: more cost time and say the same
PHASES = 4  # a scale must fit each quarter of a run, not its average
_ROWS, _WIDTH = 16, 79  # of the table and the text: what fits a screen


class Shares(NamedTuple):
    """Shares of the non-zero gradient elements at one scale, and of the steps."""

    flushed: float
    """Rounded to zero."""
    subnormal: float
    """Kept with fewer bits."""
    overflowing: float
    """Beyond the largest number."""
    steps: float
    """Share of the steps in which at least one element overflows."""


class Candidate(NamedTuple):
    """A static scale, and what each format would make of the gradients times it."""

    scale: float
    formats: dict[str, Shares]


class Advice(NamedTuple):
    """What to do, and why; as text, a table of the candidates and the recommendation."""

    verdict: str
    """"static": use `scale`; "none": float16 needs no scale here; "no single scale"; "unknown"."""
    scale: float | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    zero: float = math.nan
    """Share of the elements that were zero as recorded: nobody can tell which were flushed."""

    def __str__(self) -> str:
        found = {
            "static": f"Use {power(self.scale or 1)}.",
            "none": "Use none.",
            "no single scale": "No single scale fits.",
            "unknown": "Cannot tell.",
        }
        return "\n".join([*_table(self), found[self.verdict], fill(self.reason, _WIDTH)])


def find_scale(
    run: Run | str | os.PathLike[str],
    *,
    formats: Sequence[Format] = FORMATS,
    margin_bits: int = MARGIN_BITS,
) -> Advice:
    """Candidate static scales with what each format would lose, and one recommendation, which is
    for the first format.

    Magnitudes come from the samples' exponent counts, the largest gradient of every step from its
    amax and its probes; both are divided by the scale they were recorded at.

    >>> from gradlift.journal import Sample, Step
    >>> counts = {"elements": 4, "zero": 0.0, "exponents": {"-20": 3, "-16": 1}}
    >>> run = Run(steps=[Step(0, 1.0, 1.0, amax=2.0**-16)], samples=[Sample(0, {"w": counts})])
    >>> advice = find_scale(run)
    >>> advice.verdict, advice.scale == 2.0**28
    ('static', True)
    """
    if not isinstance(run, Run):
        run = read_journal(run)
    phases, zero = _exponents(run)
    everything = sum(phases, Counter[int]())
    peaks = sorted(_peaks(run))
    if not everything:
        return Advice(
            "unknown",
            None,
            "The run has no samples of its gradients, so nobody can tell what a scale would do to "
            "them: record it with sample_every=, or with gradlift run --every 10.",
            zero=zero,
        )
    highest = max([max(everything), *[math.frexp(p)[1] - 1 for p in peaks[-1:]]])
    lowest = min(everything)
    wanted = formats[0]
    all_normal = _exponent(wanted.smallest_normal) - lowest
    all_fit = wanted.max_exponent - highest
    ks = range(min(0, all_fit - margin_bits), max(0, all_normal, all_fit + 1) + 1)
    candidates = tuple(
        Candidate(2.0**k, {f.name: _shares(everything, peaks, k, f) for f in formats}) for k in ks
    )
    verdict, scale, reason = _recommend(phases, peaks, highest, wanted, margin_bits)
    if zero >= 0.5:
        reason += (
            f" {zero:.0%} of the elements were zero as recorded; should they have been flushed, "
            "gradlift profile on a float32 run shows them."
        )
    return Advice(verdict, scale, reason, candidates, zero)


def _recommend(
    phases: list[Counter[int]], peaks: list[float], highest: int, format: Format, margin_bits: int
) -> tuple[str, float | None, str]:
    """No scale if the format loses little without one, else the largest that is safe."""

    def lost(k: int) -> float:
        every = [_shares(phase, peaks, k, format) for phase in phases if phase]
        return max(s.flushed + s.subnormal for s in every)

    safe = format.max_exponent - highest - margin_bits
    below = f"of the elements fall below {format.name}'s normal numbers"
    top = f"The largest gradient of the run lies just below 2^{highest + 1}"
    if safe >= 0 and lost(0) <= LOSES_LITTLE:
        return (
            "none",
            1.0,
            f"{top}, and without any scale {lost(0):.2%} {below}: you need none.",
        )
    if lost(safe) <= LOSES_LITTLE:
        return (
            "static",
            2.0**safe,
            f"{top}; 2^{safe} leaves {margin_bits} bit{'s' * (margin_bits != 1)} above it, and "
            f"{lost(safe):.2%} {below} (without a scale: {lost(0):.0%}).",
        )
    return (
        "no single scale",
        None,
        f"{top}, so 2^{safe} is as much as is safe, and there {lost(safe):.0%} {below} in some "
        'part of the run: no single scale fits. Use rule="auto", which follows the gradients; lift '
        "the smallest layers (gradlift.torch.layerwise) or keep them in float32; or use bfloat16.",
    )


def _shares(counts: Counter[int], peaks: list[float], k: int, format: Format) -> Shares:
    """What `format` makes of elements in binades `counts`, times 2^k; `peaks` are sorted."""
    n = sum(counts.values())
    normal, bottom = _exponent(format.smallest_normal), _exponent(format.smallest_subnormal)
    # A number above half of the smallest one is rounded up to it: one binade more is kept.
    flushed = sum(c for e, c in counts.items() if e + k < bottom - 1)
    kept = sum(c for e, c in counts.items() if bottom - 1 <= e + k < normal)
    over = sum(c for e, c in counts.items() if e + k > format.max_exponent)
    fitting = bisect_left(peaks, True, key=lambda peak: bool(format.overflows(peak * 2.0**k)))
    steps = 1 - fitting / len(peaks) if peaks else math.nan
    return Shares(flushed / n, kept / n, over / n, steps)


def _exponents(run: Run) -> tuple[list[Counter[int]], float]:
    """Elements by true exponent, in each phase of the run; the share recorded as zero."""
    scales: dict[int, float | None] = {}
    for s in run.steps:
        usable = s.verdict in (Verdict.APPLY, None) and not s.nonfinite and 0 < s.scale < math.inf
        scale = s.scale if usable else None
        if scales.setdefault(s.step, scale) != scale:
            scales[s.step] = None  # several losses, each with its own: nobody can tell whose it is
    known = [(scale, s) for s in run.samples if (scale := scales.get(s.step))]
    known = known[:: math.ceil(len(known) / LOOKED_AT) or 1]
    phases = [Counter[int]() for _ in range(PHASES)]
    zeros = elements = 0.0
    for i, (scale, sample) in enumerate(known):
        shift = round(math.log2(scale))
        phase = phases[i * PHASES // len(known)]
        for shares in sample.parameters.values():
            n = float(shares.get("elements", 0))
            elements += n
            zeros += n * float(shares.get("zero", 0.0))
            for exponent, count in shares.get("exponents", {}).items():
                phase[int(exponent) - shift] += int(count)
    return phases, zeros / elements if elements else math.nan


def _peaks(run: Run) -> list[float]:
    """The largest true gradient of every step that has one."""
    return [
        max(s.amax, s.probe_amax if 0 < s.probe_amax < math.inf else 0.0) / s.scale
        for s in run.steps
        if not s.nonfinite and 0 < s.amax < math.inf and 0 < s.scale < math.inf
    ]


def _exponent(x: float) -> int:
    """
    >>> _exponent(0.25)
    -2
    """
    return math.frexp(x)[1] - 1


def _table(advice: Advice) -> list[str]:
    """One line a scale; the recommended one is marked."""
    if not advice.candidates:
        return []
    names = list(advice.candidates[0].formats)
    rows = [["scale", *names, "steps"]]
    for candidate in _thinned(advice):
        cells = [_cell(candidate.formats[name]) for name in names]
        mark = " <-" if candidate.scale == advice.scale else ""
        steps = _percent(candidate.formats[names[0]].steps)
        rows.append([power(candidate.scale), *cells, steps + mark])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    said = (
        "Per cent of the elements flushed/subnormal/overflowing; steps: per cent of the steps that "
        f"would overflow in {names[0]}."
    )
    return [*lines, "", fill(said, _WIDTH), ""]


def _thinned(advice: Advice) -> list[Candidate]:
    """Every n-th scale, counted from the recommended one, so that it is among them."""
    every = math.ceil(len(advice.candidates) / _ROWS)
    scales = [c.scale for c in advice.candidates]
    start = scales.index(advice.scale) % every if advice.scale in scales else 0
    return list(advice.candidates[start::every])


def _cell(shares: Shares) -> str:
    return "/".join(_percent(x) for x in (shares.flushed, shares.subnormal, shares.overflowing))


def _percent(x: float) -> str:
    """
    >>> _percent(0.0), _percent(0.00001), _percent(0.123), _percent(1.0)
    ('0', '<.1', '12.3', '100')
    """
    if math.isnan(x):
        return "-"
    if x == 0 or x == 1:
        return f"{100 * x:.0f}"
    return f"{100 * x:.1f}" if x >= 0.001 else "<.1"

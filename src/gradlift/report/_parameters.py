"""Samples added up by parameter: how much of each gradient was lost, and where it lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..formats import FP16, Format
from ..journal import Run, Sample
from ..verdict import Verdict

NAN = math.nan
Counts = Counter[int]
"""Elements by exponent, floor(log2|g|)."""


class Fate(NamedTuple):
    """Shares of gradient elements that a format flushes to zero, holds as subnormal, overflows."""

    flushed: float
    subnormal: float
    overflowed: float


class Parameter(NamedTuple):
    """One parameter's gradients over all samples."""

    name: str
    size: int | None
    elements: int
    """Seen in all samples together."""
    zeros: int
    scaled: Counts
    true: Counts
    """The same before the scale; empty if the scale is not known."""
    near_max: float
    leads: int
    """How often it was the first culprit."""
    culprit: int
    """How often it was a culprit at all."""

    @property
    def fate(self) -> Fate:
        """In FP16, as scaled. Zeros count as flushed: nobody can tell why they are zero."""
        lost = fate(self.scaled, self.elements, FP16)
        return lost._replace(flushed=lost.flushed + self.zeros / max(1, self.elements))


def parameters(run: Run) -> list[Parameter]:
    """Every parameter of a run, worst first.

    The worst has the largest sum of two shares: elements lost (flushed or subnormal), and bad
    steps that it led.

    >>> run = Run(
    ...     header={"parameters": {"head": 4, "body": 4}},
    ...     samples=[Sample(0, {"body": {"elements": 4, "zero": 0.5, "exponents": {"-3": 2}}})],
    ... )
    >>> [(p.name, p.fate.flushed) for p in parameters(run)]
    [('body', 0.5), ('head', 0.0)]
    """
    sizes = run.header.get("parameters")
    sizes = sizes if isinstance(sizes, dict) else {}
    sums: dict[str, _Sum] = {str(name): _Sum() for name in sizes}
    for sample, scale in zip(run.samples, scales_of_samples(run), strict=True):
        shift = round(math.log2(scale)) if 0 < scale < math.inf else None
        for name, shares in sample.parameters.items():
            sums.setdefault(name, _Sum()).add(shares, shift)
    leads, culprit, bad = _culprits(run)
    for name in culprit:
        sums.setdefault(name, _Sum())
    made = [
        Parameter(
            name,
            sizes.get(name),
            summed.elements,
            summed.zeros,
            summed.scaled(),
            summed.true(),
            summed.near_max / max(1, summed.elements),
            leads[name],
            culprit[name],
        )
        for name, summed in sums.items()
    ]

    def trouble(p: Parameter) -> float:
        return p.fate.flushed + p.fate.subnormal + p.leads / max(1, bad)

    return sorted(made, key=trouble, reverse=True)


class _Sum:
    """What one parameter's samples add up to."""

    def __init__(self) -> None:
        self.elements = self.zeros = 0
        self.near_max = 0.0
        self.counts: dict[int | None, dict[str, int]] = {}

    def add(self, shares: Mapping[str, Any], shift: int | None) -> None:
        elements = int(shares.get("elements", 0))
        self.elements += elements
        self.zeros += round(shares.get("zero", 0) * elements)
        self.near_max += shares.get("near_max", 0) * elements
        # By scale first, in the journal's own keys: millions of them in a long run.
        here = self.counts.setdefault(shift, {})
        for exponent, n in shares.get("exponents", {}).items():
            here[exponent] = here.get(exponent, 0) + n

    def scaled(self) -> Counts:
        total: Counts = Counter()
        for counts in self.counts.values():
            total.update({int(exponent): n for exponent, n in counts.items()})
        return total

    def true(self) -> Counts:
        total: Counts = Counter()
        for shift, counts in self.counts.items():
            if shift is not None:
                total.update({int(exponent) - shift: n for exponent, n in counts.items()})
        return total


def _culprits(run: Run) -> tuple[Counter[str], Counter[str], int]:
    """How often each parameter was the first culprit, was one at all, and how often any was."""
    leads: Counter[str] = Counter()
    all_of_them: Counter[str] = Counter()
    bad = 0
    retried = (e.detail.get("culprits") or () for e in run.events if e.what == "retry")
    skipped = (s.culprits for s in run.steps if s.verdict is not Verdict.APPLY)
    for culprits in (*retried, *skipped):
        names = [plain(c) for c in culprits]
        if names:
            bad += 1
            leads[names[0]] += 1
            all_of_them.update(names)
    return leads, all_of_them, bad


def plain(culprit: str) -> str:
    """A culprit's name without its kind.

    >>> plain("head.weight (inf)"), plain("head.weight")
    ('head.weight', 'head.weight')
    """
    return str(culprit).removesuffix(" (inf)").removesuffix(" (nan)")


def scales_of_samples(run: Run) -> list[float]:
    """The scale that each sample's gradients carried, NaN where no step tells.

    A step that was retried, or one of several losses, gives several samples of one number: they
    were written in the order of the retries and steps of that number.

    >>> from gradlift.journal import Event, Step
    >>> run = Run(
    ...     steps=[Step(0, 8.0, 8.0)],
    ...     samples=[Sample(0, {}), Sample(0, {}), Sample(1, {})],
    ...     events=[Event(0, "retry", {"scale": 16.0})],
    ... )
    >>> scales_of_samples(run)
    [16.0, 8.0, nan]
    """
    sampled: dict[int, list[int]] = {}
    for i, sample in enumerate(run.samples):
        sampled.setdefault(sample.step, []).append(i)
    known: dict[int, list[float]] = {}
    for event in run.events:
        if event.what == "retry" and event.step in sampled:
            known.setdefault(event.step, []).append(float(event.detail.get("scale", NAN)))
    for step in run.steps:
        if step.step in sampled:
            known.setdefault(step.step, []).append(step.scale)
    scales = [NAN] * len(run.samples)
    for number, indices in sampled.items():
        here = known.get(number, [NAN])
        for position, i in enumerate(indices):
            scales[i] = here[position] if len(here) == len(indices) else here[-1]
    return scales


def fate(counts: Mapping[int, int], elements: int, format: Format) -> Fate:
    """What becomes of elements with these exponents in a format.

    2^-25 is a tie that FP16 rounds to zero; whatever else has its exponent becomes 2^-24. Numbers
    of the largest binade that lie above the largest number cannot be told from those below.

    >>> fate({-30: 1, -24: 1, 0: 1, 16: 1}, 4, FP16)
    Fate(flushed=0.25, subnormal=0.25, overflowed=0.25)
    """
    zero_below, normal_from = limits(format)
    flushed = subnormal = overflowed = 0
    for exponent, n in counts.items():
        if exponent < zero_below:
            flushed += n
        elif exponent < normal_from:
            subnormal += n
        elif exponent > format.max_exponent:
            overflowed += n
    whole = max(1, elements)
    return Fate(flushed / whole, subnormal / whole, overflowed / whole)


def limits(format: Format) -> tuple[int, int]:
    """The exponent below which all is flushed, and the one from which all is normal.

    >>> limits(FP16)
    (-25, -14)
    """
    lowest = round(math.log2(format.smallest_subnormal)) - 1
    return lowest, round(math.log2(format.smallest_normal))


def share_lost(samples: Iterable[Sample]) -> float:
    """Share of all sampled elements that were zero as scaled or would be in FP16.

    >>> share_lost([Sample(0, {"w": {"elements": 4, "zero": 0.25, "exponents": {"-30": 1}}})])
    0.5
    """
    below = range(-1100, limits(FP16)[0])
    flushed = {*below, *map(str, below)}  # a journal that was read has text for keys
    lost = elements = 0.0
    for sample in samples:
        for shares in sample.parameters.values():
            n = shares.get("elements", 0)
            elements += n
            lost += shares.get("zero", 0) * n
            counts = shares.get("exponents", {})
            lost += sum([counts[e] for e in counts if e in flushed])
    return lost / elements if elements else NAN


def quantile(counts: Mapping[int, int], q: float) -> int | None:
    """The exponent below which a share `q` of the elements lies; None if there are none.

    >>> quantile({-3: 1, 0: 2, 4: 1}, 0.5), quantile({}, 0.5)
    (0, None)
    """
    left = q * sum(counts.values())
    for exponent in sorted(counts):
        left -= counts[exponent]
        if left <= 0:
            return exponent
    return None

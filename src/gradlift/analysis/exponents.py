"""Samples added up by parameter: how much of each gradient was lost, and its exponents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..core import Culprit
from ..formats import FP16, Shares
from ..journal import Run, Sample

NAN = math.nan
LOOKED_AT = 200  # samples, evenly spread: more take longer and change no share by much
Counts = Counter[int]
"""Elements by exponent, floor(log2|g|)."""


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
    def shares(self) -> Shares:
        """In FP16, as scaled. Zeros count as flushed, although the reason is not known."""
        lost = FP16.shares(self.scaled, self.elements)
        return lost._replace(flushed=lost.flushed + self.zeros / max(1, self.elements))


def parameters(run: Run) -> list[Parameter]:
    """Every parameter of a run, worst first.

    The worst has the largest sum of two shares: elements lost (flushed or subnormal), and bad
    steps (skipped or retried) in which it was the first culprit.

    >>> run = Run(
    ...     header={"parameters": {"head": 4, "body": 4}},
    ...     samples=[Sample(0, {"body": {"elements": 4, "zero": 0.5, "exponents": {"-3": 2}}})],
    ... )
    >>> [(p.name, p.shares.flushed) for p in parameters(run)]
    [('body', 0.5), ('head', 0.0)]
    """
    sizes = run.header.get("parameters")
    sizes = sizes if isinstance(sizes, dict) else {}
    tallies: dict[str, Tally] = {str(name): Tally() for name in sizes}
    for sample, scale, _ in sampled(run):
        for name, shares in sample.parameters.items():
            tallies.setdefault(name, Tally()).add(shares, scale)
    leads, culprit, bad = _culprits(run)
    for name in culprit:
        tallies.setdefault(name, Tally())
    made = [
        Parameter(
            name,
            sizes.get(name),
            tally.elements,
            tally.zeros,
            tally.scaled(),
            tally.true(),
            tally.near_max / max(1, tally.elements),
            leads[name],
            culprit[name],
        )
        for name, tally in tallies.items()
    ]

    def trouble(p: Parameter) -> float:
        return p.shares.flushed + p.shares.subnormal + p.leads / max(1, bad)

    return sorted(made, key=trouble, reverse=True)


class Tally:
    """Gradient elements added up over samples.

    >>> tally = Tally()
    >>> tally.add({"elements": 4, "zero": 0.25, "exponents": {"-3": 3}}, scale=8.0)
    >>> tally.elements, tally.zeros, tally.scaled(), tally.true()
    (4, 1, Counter({-3: 3}), Counter({-6: 3}))
    """

    def __init__(self) -> None:
        self.elements = self.zeros = 0
        self.near_max = 0.0
        self._counts: dict[float, dict[str, int]] = {}

    def add(self, shares: Mapping[str, Any], scale: float = NAN) -> None:
        """One parameter's entry of a sample, and the scale that its gradient carried."""
        elements = int(shares.get("elements", 0))
        self.elements += elements
        self.zeros += round(shares.get("zero", 0) * elements)
        self.near_max += shares.get("near_max", 0) * elements
        # By scale first, in the journal's own keys: millions of them in a long run.
        here = self._counts.setdefault(scale if 0 < scale < math.inf else 0.0, {})
        for exponent, n in shares.get("exponents", {}).items():
            here[exponent] = here.get(exponent, 0) + n

    def scaled(self) -> Counts:
        """By exponent, as scaled."""
        total: Counts = Counter()
        for counts in self._counts.values():
            for exponent, n in counts.items():
                total[int(exponent)] += n
        return total

    def true(self) -> Counts:
        """By exponent, without the scale; elements whose scale is not known are left out."""
        total: Counts = Counter()
        for scale, counts in self._counts.items():
            if scale:
                shift = round(math.log2(scale))
                for exponent, n in counts.items():
                    total[int(exponent) - shift] += n
        return total


def _culprits(run: Run) -> tuple[Counter[str], Counter[str], int]:
    """How often each parameter was the first culprit, was one at all, and how often any was."""
    leads: Counter[str] = Counter()
    all_of_them: Counter[str] = Counter()
    bad = 0
    retried = (e.detail.get("culprits") or () for e in run.events if e.what == "retry")
    skipped = (s.culprits for s in run.steps if s.skipped)
    for culprits in (*retried, *skipped):
        names = [str(culprit_of(c)) for c in culprits]
        if names:
            bad += 1
            leads[names[0]] += 1
            all_of_them.update(names)
    return leads, all_of_them, bad


def culprit_of(described: object) -> Culprit:
    """A culprit's name and kind, from `Culprit.described`.

    >>> culprit_of("head.weight (inf)"), culprit_of("head.weight (inf)").kind
    ('head.weight', 'inf')
    """
    text = str(described)
    for kind in ("inf", "nan"):
        if text.endswith(f" ({kind})"):
            return Culprit(text.removesuffix(f" ({kind})"), kind)
    return Culprit(text)


class Sampled(NamedTuple):
    """A sample, and what is known of it from the steps with its number."""

    sample: Sample
    scale: float
    """The scale that the gradients carried; NaN where it is not known."""
    clean: bool
    """They were finite, and the step was not skipped."""


def sampled(run: Run) -> list[Sampled]:
    """Every sample with the scale that its gradients carried.

    A step that was retried, or one of several losses, gives several samples of one number: they
    were written in the order of the retries and steps of that number. Where their number differs
    from that of the retries and steps, the scale is known only if all steps had the same.

    >>> from gradlift.journal import Event, Step
    >>> run = Run(
    ...     steps=[Step(0, 8.0, 8.0)],
    ...     samples=[Sample(0, {}), Sample(0, {}), Sample(1, {})],
    ...     events=[Event(0, "retry", {"scale": 16.0})],
    ... )
    >>> [(s.scale, s.clean) for s in sampled(run)]
    [(16.0, False), (8.0, True), (nan, True)]
    """
    retried: dict[int, list[tuple[float, bool]]] = {s.step: [] for s in run.samples}
    stepped: dict[int, list[tuple[float, bool]]] = {s.step: [] for s in run.samples}
    for event in run.events:
        if event.what == "retry" and event.step in retried:
            retried[event.step].append((float(event.detail.get("scale", NAN)), False))
    for step in run.steps:
        if step.step in stepped:
            clean = not (step.skipped or step.nonfinite)
            stepped[step.step].append((step.scale, clean))
    times = Counter(s.step for s in run.samples)
    seen: Counter[int] = Counter()
    found = []
    for sample in run.samples:
        number = sample.step
        in_order = retried[number] + stepped[number]
        if len(in_order) == times[number]:
            scale, clean = in_order[seen[number]]
        else:
            scales = {scale for scale, _ in stepped[number]}
            scale = scales.pop() if len(scales) == 1 else NAN
            clean = all(clean for _, clean in stepped[number])
        seen[number] += 1
        found.append(Sampled(sample, scale, clean))
    return found


def looked_at(run: Run) -> list[Sampled]:
    """Samples of clean steps, at most `LOOKED_AT`, evenly spread."""
    clean = [s for s in sampled(run) if s.clean]
    return clean[:: math.ceil(len(clean) / LOOKED_AT) or 1]


def share_flushed(samples: Iterable[Sample]) -> float:
    """Share of all sampled elements that were zero as scaled or would be in FP16.

    >>> share_flushed([Sample(0, {"w": {"elements": 4, "zero": 0.25, "exponents": {"-30": 1}}})])
    0.5
    """
    tally = Tally()
    for sample in samples:
        for shares in sample.parameters.values():
            tally.add(shares)
    if not tally.elements:
        return NAN
    return FP16.shares(tally.scaled(), tally.elements).flushed + tally.zeros / tally.elements


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

"""The static scale that would have fitted a recorded run, if one is needed and one fits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from ..formats import Format
from ..journal import Run, read_journal
from ..rules.static_choice import FORMATS, MARGIN_BITS, Advice, choose
from .exponents import Tally, looked_at


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
    tallies: list[Tally] = []
    for sample, scale, _ in looked_at(run):
        if 0 < scale < math.inf:
            tallies.append(Tally())
            for shares in sample.parameters.values():
                tallies[-1].add(shares, scale)
    samples = [tally.true() for tally in tallies]
    elements = sum(tally.elements for tally in tallies)
    zero = sum(tally.zeros for tally in tallies) / elements if elements else math.nan
    if not any(samples):
        return Advice(
            "unknown",
            None,
            "The run has no samples of its gradients: record it with every=, or with gradlift run "
            "--every 10.",
            zero=zero,
        )
    peaks = [s.peak / s.scale for s in run.steps if s.peak > 0 and 0 < s.scale < math.inf]
    return choose(samples, peaks, formats=formats, margin_bits=margin_bits, zero=zero)

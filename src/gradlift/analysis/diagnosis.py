"""The findings of a run, most serious first."""

from __future__ import annotations

import os

from ..journal import Run
from ..logs import read_run
from .changes import change
from .findings import CHECKS, EXPLAINS, SEVERITIES, Finding
from .findings.finding import rank

__all__ = ["SEVERITIES", "Finding", "diagnose"]


def diagnose(run: Run | str | os.PathLike[str]) -> list[Finding]:
    """What is wrong with a run, a journal or somebody's log, most serious first; an empty list if
    nothing is.

    Each finding has its evidence, the steps and parameters to look at, and advice.

    >>> from gradlift.journal import Step
    >>> diagnose(Run(steps=[Step(i, 1024.0, 1024.0) for i in range(9)]))
    []
    >>> [finding] = diagnose(Run(steps=[Step(i, 1000.0, 1000.0) for i in range(9)]))
    >>> finding.severity, finding.kind, finding.title
    ('hint', 'odd-scale', 'The scale is not a power of two')
    """
    if not isinstance(run, Run):
        run = read_run(run)
    found = [finding for check in CHECKS if (finding := check(run))]
    kept: list[Finding] = []
    for finding in found:  # causes come before their consequences
        if any(f.kind == finding.kind for f in kept):
            continue
        causes = [i for i, f in enumerate(kept) if finding.kind in EXPLAINS.get(f.kind, ())]
        if not causes:
            kept.append(finding)
        elif rank(finding) < rank(kept[causes[0]]):  # as serious as what it leads to
            kept[causes[0]] = kept[causes[0]]._replace(severity=finding.severity)
    kept = [finding._replace(diff=finding.diff or change(run, finding)) for finding in kept]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))

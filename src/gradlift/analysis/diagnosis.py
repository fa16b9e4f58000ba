"""The findings of a run, most serious first."""

from __future__ import annotations

import os

from ..journal import Run, read_journal
from .findings import CHECKS, EXPLAINS, SEVERITIES, Finding

__all__ = ["SEVERITIES", "Finding", "diagnose"]


def diagnose(run: Run | str | os.PathLike[str]) -> list[Finding]:
    """What is wrong with a run, most serious first; an empty list if nothing is.

    Each finding has its evidence, the steps and parameters to look at, and advice.

    >>> from gradlift.journal import Step
    >>> diagnose(Run(steps=[Step(i, 1024.0, 1024.0) for i in range(9)]))
    []
    >>> [finding] = diagnose(Run(steps=[Step(i, 1000.0, 1000.0) for i in range(9)]))
    >>> finding.severity, finding.kind, finding.title
    ('hint', 'odd-scale', 'The scale is not a power of two')
    """
    if not isinstance(run, Run):
        run = read_journal(run)
    found = [finding for check in CHECKS if (finding := check(run))]
    explained = {kind for finding in found for kind in EXPLAINS.get(finding.kind, ())}
    kept = [finding for finding in found if finding.kind not in explained]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))

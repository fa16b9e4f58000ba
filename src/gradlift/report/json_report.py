"""The report for other programs: findings, figures, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..analysis.diagnosis import Finding, diagnose
from ..analysis.exponents import Parameter, parameters, quantile
from ..analysis.totals import totals
from ..journal import Run
from .modules import modules
from .story import settings, title, verdict, versions


def as_json(run: Run) -> dict[str, Any]:
    """A run's findings, figures and settings as plain values that `json.dumps` takes.

    >>> from gradlift.journal import Step
    >>> made = as_json(Run(steps=[Step(0, 8.0, 8.0, amax=2.0)]))
    >>> made["totals"]["applied"], made["totals"]["last_scale"], made["totals"]["last_loss"]
    (1, 8.0, None)
    """
    return report(run, diagnose(run))


def report(run: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same, with findings that are already known."""
    added = totals(run)
    severity, sentence = verdict(run, findings)
    made = {
        "schema": 1,
        "run": title(run),
        "severity": severity,
        "verdict": sentence,
        "findings": [finding._asdict() for finding in findings],
        "totals": added._asdict(),
        "parameters": [_parameter(p) for p in parameters(run)],
        "modules": [m._asdict() for m in modules(run)],
        "settings": settings(run),
        "versions": versions(run),
    }
    plain: dict[str, Any] = _plain(made)
    return plain


def _parameter(p: Parameter) -> dict[str, Any]:
    return {
        "name": p.name,
        "size": p.size,
        "flushed": p.shares.flushed if p.elements else None,
        "subnormal": p.shares.subnormal if p.elements else None,
        "near_max": p.near_max if p.elements else None,
        "lowest_exponent": min(p.scaled, default=None),
        "median_exponent": quantile(p.scaled, 0.5),
        "highest_exponent": max(p.scaled, default=None),
        "culprit": p.culprit,
        "first_culprit": p.leads,
    }


def _plain(value: Any) -> Any:
    """Values that JSON has: lists for tuples, None for NaN, text for inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if value != value else str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value

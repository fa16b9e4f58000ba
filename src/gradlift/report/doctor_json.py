"""The doctor's answer for other programs, as doctor.schema.json describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..analysis import words
from ..analysis.coverage import coverage
from ..analysis.diagnosis import Finding
from ..journal import Event, Run
from ..text import visible
from .story import verdict
from .thinning import streaks

SCHEMA = files(__name__.rpartition(".")[0]) / "doctor.schema.json"
"""The file of `gradlift doctor --schema`."""


def doctor_json(run: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """The verdict, findings, what was looked at, and each step that was not applied.

    >>> made = doctor_json(Run(), [])
    >>> made["severity"], made["findings"]
    ('empty', [])
    """
    severity, sentence = verdict(run, findings)
    seen = coverage(run)
    return {
        "schema": 1,
        "run": visible(str(run.path)) if run.path else None,
        "severity": severity,
        "verdict": sentence,
        "broken": any(f.severity == "broken" for f in findings),
        "steps": len(run.steps),
        "skipped": run.skipped,
        "findings": [
            {**f._asdict(), "steps": list(f.steps), "parameters": list(f.parameters)}
            for f in findings
        ],
        "skipped_steps": [
            {"first": m.first, "last": m.last, "times": m.times, "cause": m.cause, "key": m.key}
            for m in streaks(run)
        ],
        "looked_at": seen.looked,
        "not_looked_at": seen.not_looked,
        "events": not_applied(run),
    }


def not_applied(run: Run) -> list[dict[str, Any]]:
    """Every skip, retry and halt: its step, cause, scale and culprits."""
    return [_plain(e) for e in run.events if e.what in ("skip", "retry", "halt")]


def _plain(event: Event) -> dict[str, Any]:
    """Of a journal's own making each field is what it should be; of another one it may be anything.

    >>> _plain(Event(3, "skip", {"scale": 8.0, "next_scale": [], "key": 7}))["scale"]
    8.0
    """
    detail = event.detail
    culprits, batch = detail.get("culprits"), detail.get("micro_batch")
    return {
        "step": event.step,
        "what": event.what,
        "cause": words.cause(detail.get("cause") or ""),
        "scale": _number(detail.get("scale")),
        "next_scale": _number(detail.get("next_scale")),
        "culprits": [str(c) for c in culprits] if isinstance(culprits, list) else [],
        "micro_batch": batch if type(batch) is int and batch >= 0 else None,
        "key": str(detail.get("key") or ""),
    }


def _number(value: object) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else None  # type: ignore[arg-type]

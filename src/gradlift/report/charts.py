"""The data of the page's charts, as short lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..analysis.diagnosis import Finding
from ..analysis.exponents import Counts, Parameter, quantile
from ..analysis.findings import EXPLAINS
from ..core import Cause
from ..formats import BF16, E4M3, E5M2, FP16, Format
from ..journal import Run, Step
from .sampled import MOST_SAMPLES, forward_data, outputs, update_data, updates
from .seen_in import seen_in
from .thinning import MOST_PARAMETERS, Mark, spread, thin

FORMATS = (FP16, BF16, E5M2, E4M3)
SERIES = ("scale", "headroom", "norm", "loss")


def chart_data(
    run: Run, parameters: list[Parameter], marks: list[Mark], findings: Sequence[Finding] = ()
) -> dict[str, Any]:
    """Everything that the page's script draws, as JSON can hold it."""
    listed = {step for finding in findings for step in finding.steps}
    data: dict[str, Any] = {
        "lines": [_line(key, steps, marks, listed) for key, steps in run.by_key.items()],
        "marks": _marks(marks),
        "formats": [_range(format) for format in FORMATS],
        "histograms": _histograms(parameters),
        "heat": _heat(run, [p.name for p in parameters[:MOST_PARAMETERS]]),
        "forward": forward_data(run, outputs(run)),
        "updates": update_data(run, updates(run)),
    }
    charts = charts_of(data) | ({"calls"} if run.calls else set())
    names = identities(findings)
    data["findings"] = [
        {
            "id": name,
            "kind": finding.kind,
            "severity": finding.severity,
            "title": finding.title,
            "chart": seen_in(finding, charts),
            "steps": list(finding.steps),
            "parameters": list(finding.parameters),
        }
        for name, finding in zip(names, findings, strict=True)
    ]
    data["marks"]["finding"] = explained(marks, findings, names)
    return data


def charts_of(data: Mapping[str, Any]) -> set[str]:
    """The charts for which there are numbers."""
    found = {
        name
        for name in SERIES
        if any(value is not None for line in data["lines"] for value in line[name])
    }
    found |= {"histogram"} if data["histograms"] else set()
    return found | {name for name in ("heat", "forward", "updates") if data[name]["names"]}


def identities(findings: Sequence[Finding]) -> list[str]:
    """The name of each finding in the address bar: its kind, with a number if it has none.

    >>> identities([Finding("hint", "", "", kind="start"), Finding("hint", "", "")])
    ['start', '2']
    """
    names: list[str] = []
    for i, finding in enumerate(findings, 1):
        taken = not finding.kind or finding.kind in names
        names.append(f"{finding.kind}-{i}".lstrip("-") if taken else finding.kind)
    return names


def explained(
    marks: Sequence[Mark], findings: Sequence[Finding], names: Sequence[str]
) -> list[str]:
    """The finding of each mark, "" for a mark that no finding is about.

    It is the first finding that lists one of the mark's steps. A finding lists the first few steps
    only, so a mark that none lists belongs to the first finding that lists a mark of its cause, or
    else to the first one that such marks are a consequence of, if it began before.
    """
    of_cause: dict[str, str] = {}
    direct = []
    for mark in marks:
        listing = (
            name
            for name, finding in zip(names, findings, strict=True)
            if any(mark.first <= step <= mark.last for step in finding.steps)
        )
        direct.append(next(listing, ""))
        if direct[-1]:
            of_cause.setdefault(mark.cause, direct[-1])
    return [
        name or of_cause.get(mark.cause) or _source(mark, findings, names)
        for mark, name in zip(marks, direct, strict=True)
    ]


def _source(mark: Mark, findings: Sequence[Finding], names: Sequence[str]) -> str:
    symptom = "forward-nan" if mark.cause == str(Cause.LOSS_NONFINITE) else "overflows"
    for name, finding in zip(names, findings, strict=True):
        began = min(finding.steps, default=0)
        if mark.first >= began and symptom in (finding.kind, *EXPLAINS.get(finding.kind, ())):
            return name
    return ""


def _line(key: str, steps: list[Step], marks: list[Mark], listed: set[int]) -> dict[str, Any]:
    """One loss's curves, thinned so that the extremes and all marked steps stay."""
    series = columns(steps)
    marked = {step for m in marks if m.key == key for step in (m.first, m.last)} | listed
    keep = (i for i, s in enumerate(steps) if s.step in marked)
    chosen = thin(list(series.values()), keep)
    return {
        "key": key,
        "all": len(steps),
        "step": [steps[i].step for i in chosen],
        "later": _starts_again(steps, chosen),
        **{name: [_short(values[i]) for i in chosen] for name, values in series.items()},
    }


def columns(steps: list[Step]) -> dict[str, list[float]]:
    """The four series that are drawn over steps: log2 of the scale, headroom, norm, loss.

    >>> columns([Step(0, 8.0, 8.0, loss=2.0)])["scale"]
    [3.0]
    """
    log2, nan = math.log2, math.nan
    return {
        "scale": [log2(s.scale) if 0 < s.scale < math.inf else nan for s in steps],
        "headroom": [s.headroom() for s in steps],
        "norm": [s.norm if s.norm > 0 else nan for s in steps],
        "loss": [s.loss for s in steps],
    }


def _starts_again(steps: list[Step], chosen: list[int]) -> list[int]:
    """Positions where the step number decreases: a resumed run, where a new line starts."""
    numbers = [steps[i].step for i in chosen]
    return [i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1]]


def _marks(marks: list[Mark]) -> dict[str, list[Any]]:
    return {
        "first": [m.first for m in marks],
        "last": [m.last for m in marks],
        "times": [m.times for m in marks],
        "what": [m.what for m in marks],
        "cause": [m.cause for m in marks],
        "scale": [_short(math.log2(m.scale)) if m.scale > 0 else None for m in marks],
        "culprit": [m.culprit for m in marks],
        "key": [m.key for m in marks],
    }


def _range(format: Format) -> dict[str, Any]:
    return {
        "name": format.name,
        "flushed_below": format.flushed_below,
        "normal_from": format.min_exponent,
        "last": format.max_exponent,
    }


def _histograms(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """Shares by exponent, before and after scaling: of all parameters first, then of each."""
    seen = [p for p in parameters if p.elements]
    if not seen:
        return []
    every = {
        "name": "",
        "zero": sum(p.zeros for p in seen) / sum(p.elements for p in seen),
        "scaled": _shares(sum_of(p.scaled for p in seen), sum(p.elements for p in seen)),
        "true": _shares(sum_of(p.true for p in seen), sum(p.elements for p in seen)),
    }
    each = [
        {
            "name": p.name,
            "zero": _short(p.zeros / p.elements),
            "scaled": _shares(p.scaled, p.elements),
            "true": _shares(p.true, p.elements),
        }
        for p in seen[:MOST_PARAMETERS]
    ]
    return [every, *each]


def sum_of(counts: Iterable[Counts]) -> Counts:
    """Histograms added up.

    >>> sum_of([Counter({-3: 1}), Counter({-3: 2, 0: 1})])
    Counter({-3: 3, 0: 1})
    """
    total: Counts = Counter()
    for each in counts:
        total.update(each)
    return total


def _shares(counts: Mapping[int, int], elements: int) -> list[int]:
    """The lowest exponent, then the share of each from there on, in parts of a million.

    A smaller share is written as one part, so that it is not lost.
    """
    if not counts:
        return []
    lowest = min(counts)
    found = (counts.get(e, 0) for e in range(lowest, max(counts) + 1))
    return [lowest, *(max(1, round(1e6 * n / elements)) if n else 0 for n in found)]


def _heat(run: Run, worst_first: list[str]) -> dict[str, Any]:
    """Exponents by parameter and sample, as scaled; in the model's order where it is known."""
    samples = [run.samples[i] for i in spread(len(run.samples), MOST_SAMPLES)]
    sampled = {name for sample in samples for name in sample.parameters}.intersection(worst_first)
    known = [n for n in run.header.get("parameters") or worst_first if n in sampled]
    missing = sampled.difference(known)
    names = known + [n for n in worst_first if n in missing]
    rows: dict[str, list[list[Any]]] = {"median": [], "low": [], "high": [], "zero": []}
    for name in names:
        cells = [_cell(sample.parameters.get(name)) for sample in samples]
        for row, values in zip(rows.values(), zip(*cells), strict=True):
            row.append(list(values))
    return {
        "all": len(run.samples),
        "names": names,
        "step": [sample.step for sample in samples],
        **rows,
    }


def _cell(shares: Mapping[str, Any] | None) -> tuple[int | float | None, ...]:
    """Median, lowest and highest exponent, and percent of zeros."""
    if not shares:
        return None, None, None, None
    counts = {int(e): n for e, n in shares.get("exponents", {}).items()}
    zero = _short(100 * shares.get("zero", 0), 3)
    if not counts:
        return None, None, None, zero
    return quantile(counts, 0.5), min(counts), max(counts), zero


def _short(value: float, digits: int = 5) -> float | int | None:
    """As many digits as a chart can show; None, JSON's null, for what is no number."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e9 else rounded

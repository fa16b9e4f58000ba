"""What samples of the forward pass and of weights showed, by module and by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from ..formats import FP16
from ..journal import Run
from .thinning import spread

MOST_SAMPLES = 120
MOST_RANGES = 40
MOST_UPDATES = 1000


class Outputs(NamedTuple):
    """One module's outputs in the forward pass, over all samples."""

    name: str
    type: str
    dtype: str
    low: float
    """The smallest of the largest |outputs|; NaN if none was finite and above zero."""
    high: float
    """The largest of them; inf if an output was not finite."""
    at: int
    """The step of the largest."""
    zero: float
    """The largest share of zeros."""
    nonfinite: int
    """Elements that were not finite, in all samples."""

    @property
    def headroom(self) -> float:
        """Bits below 65504; 0 for what is not finite, NaN where nothing was above zero."""
        return FP16.headroom(min(self.high, FP16.max)) if self.high > 0 else math.nan


def outputs(run: Run) -> list[Outputs]:
    """Every module whose outputs were looked at, in the order of calls.

    >>> from gradlift.journal import Probe
    >>> looks = [Probe(i, {"head": {"dtype": "float16", "amax": 2.0**i}}) for i in (1, 3)]
    >>> [(m.name, m.low, m.high, m.at) for m in outputs(Run(forwards=looks))]
    [('head', 2.0, 8.0, 3)]
    """
    seen: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for look in run.forwards:
        for name, row in look.modules.items():
            seen.setdefault(name, []).append((look.step, row))
    return [_outputs(name, rows) for name, rows in seen.items()]


def _outputs(name: str, rows: list[tuple[int, Mapping[str, Any]]]) -> Outputs:
    peaks = [(peak(row), step) for step, row in rows]
    high, at = max(peaks, key=lambda found: found[0])
    known = [p for p, _ in peaks if 0 < p < math.inf]
    bad = sum(int(row.get("nonfinite", 0)) for _, row in rows)
    first = rows[0][1]
    return Outputs(
        name,
        str(first.get("type", "")),
        str(first.get("dtype", "")),
        min(known, default=math.nan),
        high,
        at,
        max(float(row.get("zero", 0)) for _, row in rows),
        bad,
    )


def peak(row: Mapping[str, Any]) -> float:
    """A module's largest |output| in one sample; inf if one of them was not finite."""
    top = float(row.get("amax", 0.0))
    return math.inf if row.get("nonfinite") or top != top else top


def tightest(found: list[Outputs], most: int = MOST_RANGES) -> list[Outputs]:
    """Those that come closest to 65504, still in the order of calls."""
    if len(found) <= most:
        return found
    worst = sorted(range(len(found)), key=lambda i: -found[i].high)[:most]
    return [found[i] for i in sorted(worst)]


class Updates(NamedTuple):
    """One parameter's updates, over all samples of weights."""

    name: str
    dtype: str
    ratio: float
    """The median of |update| / |weight|, both as root mean squares; NaN if not known."""
    lost: float
    """The largest share of updates that left their weight as it was; NaN if not known."""
    below_eps: float
    nonfinite: int
    """Samples in which a weight was not finite."""


def updates(run: Run) -> list[Updates]:
    """Every parameter whose weights were looked at, most updates lost first.

    >>> from gradlift.journal import Sample
    >>> facts = {"dtype": "bfloat16", "rms": 1.0, "update": 0.001, "unchanged": 0.25}
    >>> [(u.ratio, u.lost) for u in updates(Run(weights=[Sample(0, {"w": facts})]))]
    [(0.001, 0.25)]
    """
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for sample in run.weights:
        for name, row in sample.parameters.items():
            seen.setdefault(name, []).append(row)
    found = [_updates(name, rows) for name, rows in seen.items()]
    return sorted(found, key=lambda u: -u.lost if u.lost == u.lost else 1.0)


def _updates(name: str, rows: list[Mapping[str, Any]]) -> Updates:
    known = [r for row in rows if not math.isnan(r := ratio(row))]
    return Updates(
        name,
        str(rows[0].get("dtype", "")),
        median(known) if known else math.nan,
        _largest(rows, "unchanged"),
        _largest(rows, "below_eps"),
        sum(bool(row.get("nonfinite")) for row in rows),
    )


def ratio(row: Mapping[str, Any]) -> float:
    """|update| / |weight| of one sample; NaN if it is not known or not finite.

    >>> ratio({"rms": 2.0, "update": 0.5}), ratio({"rms": 2.0, "update": math.inf})
    (0.25, nan)
    """
    size, step = float(row.get("rms", math.nan)), float(row.get("update", math.nan))
    found = step / size if size > 0 and math.isfinite(size) and step >= 0 else math.nan
    return found if math.isfinite(found) else math.nan


def _largest(rows: list[Mapping[str, Any]], name: str) -> float:
    return max((float(row[name]) for row in rows if name in row), default=math.nan)


def forward_data(run: Run, found: list[Outputs]) -> dict[str, Any]:
    """What the page draws of the forward pass; exponents as base-2 logarithms."""
    looks = [run.forwards[i] for i in spread(len(run.forwards), MOST_SAMPLES)]
    shown = tightest(found)
    return {
        "names": [m.name for m in shown],
        "type": [m.type for m in shown],
        "dtype": [m.dtype for m in shown],
        "low": [_log2(m.low) for m in shown],
        "high": [_log2(m.high) or 0.0 for m in shown],
        "bad": [m.high == math.inf for m in shown],
        "at": [m.at for m in shown],
        "step": [look.step for look in looks],
        "tops": [[_log2(peak(look.modules.get(m.name, {}))) for look in looks] for m in shown],
    }


def _log2(value: float) -> float | None:
    """To three digits; just above 65504 for inf, None for zero and what is not known."""
    if value == math.inf:
        return 16.5
    return round(math.log2(value), 3) if value > 0 else None


def update_data(run: Run, found: list[Updates]) -> dict[str, Any]:
    """What the page draws of updates: ratios as base-10 logarithms, and percent lost."""
    samples = [run.weights[i] for i in spread(len(run.weights), MOST_SAMPLES)]
    chosen = {u.name for u in found[:MOST_UPDATES]}
    header = run.header.get("parameters") or {}
    names = [n for n in header if n in chosen]
    names += [u.name for u in found[:MOST_UPDATES] if u.name not in header]
    cells = [[_cell(sample.parameters.get(name, {})) for sample in samples] for name in names]
    return {
        "all": len(run.weights),
        "names": names,
        "step": [sample.step for sample in samples],
        "ratio": [[r for r, _ in row] for row in cells],
        "lost": [[lost for _, lost in row] for row in cells],
    }


def _cell(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    moved, lost = ratio(row), row.get("unchanged")
    exponent = round(math.log10(moved), 2) if moved > 0 else None
    return exponent, None if lost is None else round(100 * float(lost), 1)

"""What probes and lifts recorded, by module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..formats import FP16
from ..journal import Run

MOST_MODULES = 40


class Module(NamedTuple):
    """One module's float16 gradients, over all probed steps."""

    name: str
    headroom: float
    """The fewest bits between its largest gradient and 65504; NaN if it was never above zero."""
    zero: float
    subnormal: float
    near_max: float
    lift: float
    """The lift that was recorded last; NaN without layerwise."""


def modules(run: Run) -> list[Module]:
    """Every module that was probed, the least headroom first.

    >>> from gradlift.journal import Probe
    >>> shares = {"elements": 8, "zero": 0.5, "subnormal": 0.0, "near_max": 0.0, "amax": 32752.0}
    >>> modules(Run(probes=[Probe(0, {"body": shares})]))[0][:3]
    ('body', 1.0, 0.5)
    """
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for probe in run.probes:
        for name, shares in probe.modules.items():
            seen.setdefault(name, []).append(shares)
    found = [_module(name, each) for name, each in seen.items()]
    return sorted(found, key=lambda m: math.inf if math.isnan(m.headroom) else m.headroom)


def _module(name: str, looks: list[Mapping[str, Any]]) -> Module:
    peaks = [x for look in looks if (x := _number(look, "amax")) > 0]
    peak = min(max(peaks, default=0.0), FP16.max)  # inf: it overflowed, no headroom
    zero, subnormal, near = (_mean(looks, what) for what in ("zero", "subnormal", "near_max"))
    lifts = [x for look in looks if not math.isnan(x := _number(look, "lift"))]
    return Module(
        name, FP16.headroom(peak), zero, subnormal, near, lifts[-1] if lifts else math.nan
    )


def _mean(looks: list[Mapping[str, Any]], what: str) -> float:
    known = [x for look in looks if not math.isnan(x := _number(look, what))]
    return sum(known) / len(known) if known else math.nan


def _number(look: Mapping[str, Any], what: str) -> float:
    return float(look.get(what, math.nan))

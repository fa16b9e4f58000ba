"""What a chart shows of a step and of a sample: the same names in every sink."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ..formats import FP16
from ..journal import Sample, Step
from ..verdict import Verdict


class Scalars:
    """Named numbers of each step; counts the skipped ones, for each key by itself.

    What is not known or not finite is left out: not every chart can show it, and the journal has
    it. A resumed run counts from zero.

    >>> Scalars().of(Step(0, scale=1024.0, next_scale=1024.0, amax=2047.0, loss=0.25))
    {'gradlift/scale_log2': 10.0, 'gradlift/skipped': 0.0, 'gradlift/loss': 0.25, \
'gradlift/amax': 2047.0, 'gradlift/headroom_bits': 5.0}
    """

    def __init__(self) -> None:
        self._skipped: Counter[str] = Counter()

    def of(self, step: Step) -> dict[str, float]:
        self._skipped[step.key] += step.verdict not in (Verdict.APPLY, None)
        values = {
            "scale_log2": _log2(step.scale),
            "skipped": self._skipped[step.key],
            "loss": step.loss,
            "grad_norm": step.norm,
            "amax": step.amax,
            "headroom_bits": headroom_bits(step),
            "lr": step.lr,
        }
        prefix = f"gradlift/{step.key}/" if step.key else "gradlift/"
        return {
            prefix + name: float(value) for name, value in values.items() if math.isfinite(value)
        }


def headroom_bits(step: Step) -> float:
    """How many times the scale could double before the largest gradient leaves FP16.

    >>> headroom_bits(Step(0, 8.0, 8.0, amax=65504 / 4))
    2.0
    """
    return _log2(FP16.max) - _log2(step.amax)


def worst_shares(sample: Sample) -> dict[str, float]:
    """The largest shares of any parameter: zero, subnormal, near the top.

    >>> worst_shares(Sample(0, {"a": {"zero": 0.5}, "b": {"zero": 0.25}}))
    {'gradlift/worst_zero': 0.5}
    """
    worst: dict[str, float] = {}
    for shares in sample.parameters.values():
        for name in ("zero", "subnormal", "near_max"):
            if name in shares:
                tag = f"gradlift/worst_{name}"
                worst[tag] = max(float(shares[name]), worst.get(tag, 0.0))
    return worst


def bins(shares: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Exponents from the lowest to the highest, without gaps, and how many elements have each.

    >>> bins({"exponents": {"-20": 3, "-18": 1}})
    ([-20, -19, -18], [3, 0, 1])
    """
    counts = {int(e): int(n) for e, n in shares.get("exponents", {}).items()}
    exponents = list(range(min(counts), max(counts) + 1)) if counts else []
    return exponents, [counts.get(e, 0) for e in exponents]


def short_facts(header: dict[str, Any]) -> dict[str, Any]:
    """The header without what is too long for a page of settings: parameters are counted.

    >>> short_facts({"kind": "header", "rule": "auto", "parameters": {"w": 4, "b": 2}})
    {'rule': 'auto', 'parameters': 2}
    """
    facts = {name: value for name, value in header.items() if name != "kind"}
    if "parameters" in facts:
        facts["parameters"] = len(facts["parameters"])
    return facts


def _log2(x: float) -> float:
    return math.log2(x) if 0 < x < math.inf else math.nan

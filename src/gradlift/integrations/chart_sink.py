"""What a chart shows of a step, an event and a sample: the same names in every sink."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from typing import Any

from ..errors import GradliftError
from ..journal import Event, Sample, Step
from ..text import visible


class ChartSink:
    """Turns records into named numbers, and counts skipped steps and events; `_log` takes them.

    What is not known or not finite is left out: not every chart can show it, and the journal has
    it. A resumed run counts from zero.

    >>> class Printed(ChartSink):
    ...     def _log(self, step, values):
    ...         print(step, values)
    >>> Printed().step(Step(0, scale=1024.0, next_scale=1024.0, amax=2047.0, loss=0.25))
    0 {'gradlift/scale_log2': 10.0, 'gradlift/skipped': 0.0, 'gradlift/loss': 0.25, \
'gradlift/amax': 2047.0, 'gradlift/headroom_bits': 5.0}
    """

    def __init__(self) -> None:
        self._skipped, self._events = Counter[str](), Counter[str]()
        self._last = 0
        """The latest step, for events that belong to none."""

    def step(self, step: Step) -> None:
        self._last = step.step
        self._skipped[step.key] += step.skipped
        values = {
            "scale_log2": math.log2(step.scale) if 0 < step.scale < math.inf else math.nan,
            "skipped": self._skipped[step.key],
            "loss": step.loss,
            "grad_norm": step.norm,
            "amax": step.amax,
            "headroom_bits": step.headroom(),
            "lr": step.lr,
        }
        prefix = f"gradlift/{visible(step.key)}/" if step.key else "gradlift/"
        known = {prefix + name: float(v) for name, v in values.items() if math.isfinite(v)}
        self._log(step.step, known)

    def event(self, event: Event) -> None:
        name = f"gradlift/events/{visible(event.what)}"
        self._events[name] += 1
        self._log(self._step_of(event), {name: self._events[name]})

    def _step_of(self, event: Event) -> int:
        return self._last if event.step is None else event.step

    def sample(self, sample: Sample) -> None:
        """The largest shares of any parameter, and each one's exponents."""
        values: dict[str, Any] = {}
        for shares in sample.parameters.values():
            for name in ("zero", "subnormal", "near_max"):
                if name in shares:
                    tag = f"gradlift/worst_{name}"
                    values[tag] = max(float(shares[name]), values.get(tag, 0.0))
        for name, shares in sample.parameters.items():
            counts = {int(e): int(n) for e, n in shares.get("exponents", {}).items()}
            if counts:
                exponents = range(min(counts), max(counts) + 1)
                histogram = self._histogram(exponents, [counts.get(e, 0) for e in exponents])
                values |= {f"gradlift/exponents/{visible(name)}": histogram} if histogram else {}
        self._log(sample.step, values)

    def _histogram(self, exponents: range, counts: list[int]) -> Any:
        """How many elements have each of these exponents; None where a sink shows no histograms."""
        return None

    def _log(self, step: int, values: dict[str, Any]) -> None:
        raise NotImplementedError


def short_facts(header: dict[str, Any]) -> dict[str, Any]:
    """The header as a page of settings shows it: parameters are counted, texts safe to print.

    >>> short_facts({"kind": "header", "rule": "auto", "parameters": {"w": 4, "b": 2}})
    {'rule': 'auto', 'parameters': 2}
    """
    facts = {name: value for name, value in header.items() if name != "kind"}
    if "parameters" in facts:
        facts["parameters"] = len(facts["parameters"])
    safe: dict[str, Any] = _safe(facts)
    return safe


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(name)): _safe(each) for name, each in value.items()}
    return [_safe(each) for each in value] if isinstance(value, (list, tuple)) else value


def needed(module: str) -> Any:
    """The module of a sink's package, imported now.

    >>> needed("absent.module")
    Traceback (most recent call last):
        ...
    gradlift.errors.GradliftError: this sink needs absent (No module named 'absent'): \
pip install absent
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GradliftError(f"this sink needs {package} ({error}): pip install {package}") from None

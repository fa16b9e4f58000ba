"""Rules that move the scale: `Off`, `Static`, `Backoff`, `Headroom`, `Histogram`, `LogMax`.

A rule is frozen settings plus a pure, branch-free `advance(state, reading) -> state` that runs
unchanged on Python numbers, NumPy, torch, JAX and Keras, and gives the same scales on each.

>>> from gradlift import Reading, rules
>>> rule = rules.parse("megatron:hysteresis=4,min_scale=2^-4")
>>> rule.hysteresis, rule.min_scale
(4, 0.0625)
>>> rules.parse(str(rule)) == rule
True
"""

from ._backoff import Backoff
from ._fixed import Off, Static
from ._headroom import Headroom
from ._magnitudes import Histogram, LogMax
from ._presets import PRESETS, parse, preset
from ._rule import Rule, ScaleState

__all__ = [
    "Rule",
    "ScaleState",
    "Off",
    "Static",
    "Backoff",
    "Headroom",
    "Histogram",
    "LogMax",
    "PRESETS",
    "preset",
    "parse",
]

"""Rules that move the scale: `Off`, `Static`, `Backoff`, `Headroom`.

A rule is frozen settings plus a pure, branch-free `advance(state, reading) -> state` that runs
unchanged on Python numbers, NumPy, torch, JAX and Keras, and gives the same scales on each.

>>> from gradlift import Reading, rules
>>> rule = rules.parse("megatron:hysteresis=4,min_scale=2^-4")
>>> rule.hysteresis, rule.min_scale
(4, 0.0625)
>>> rules.parse(str(rule)) == rule
True
"""

from .backoff import Backoff
from .base import Rule, ScaleState
from .fixed import Off, Static
from .headroom import Headroom
from .presets import PRESETS, preset
from .text import parse, resolve

__all__ = [
    "Rule",
    "ScaleState",
    "Off",
    "Static",
    "Backoff",
    "Headroom",
    "PRESETS",
    "preset",
    "parse",
    "resolve",
]

"""Keras' own arguments, and tf.keras', as a rule."""

from __future__ import annotations

import math
from typing import Any

from ..errors import SettingsError, warn
from ..rules import Rule, Static, preset, resolve
from ..rules.base import is_power_of_two

SCALE, INTERVAL = 2.0**15, 2000  # Keras' own


def rule_of(
    rule: Any, initial_scale: float | None, growth_steps: int | None, dynamic: bool
) -> Rule:
    """The rule that the arguments ask for."""
    if rule is not None:
        if initial_scale is not None or growth_steps is not None or not dynamic:
            raise SettingsError(
                "initial_scale, dynamic_growth_steps and dynamic belong to Keras' own rule; with "
                "rule= write them into it, as in rule='keras:init_scale=2^10,growth_interval=500'"
            )
        return resolve(rule, retries=False)
    scale = SCALE if initial_scale is None else float(initial_scale)
    if not dynamic:
        if initial_scale is None:
            raise SettingsError("dynamic=False wants initial_scale=, the scale to keep")
        return Static(scale)
    interval = INTERVAL if growth_steps is None else growth_steps
    odd = math.isfinite(scale) and not is_power_of_two(scale)
    if odd:
        warn(
            f"initial_scale={scale!r} is not a power of two, so every gradient is rounded once "
            "more when it is unscaled"
        )
    return preset("keras", init_scale=scale, growth_interval=interval, powers_of_two=not odd)

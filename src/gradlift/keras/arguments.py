"""Keras' own arguments, and tf.keras', as a rule."""

from __future__ import annotations

import math
from typing import Any

from ..errors import SettingsError, SettingsTypeError, warn
from ..rules import Rule, Static, preset, resolve
from ..rules.base import is_power_of_two

SCALE, INTERVAL = 2.0**15, 2000  # Keras' own


def rule_of(
    rule: Any, initial_scale: float | None, growth_steps: int | None, dynamic: bool
) -> Rule:
    """The rule that the arguments ask for."""
    if not isinstance(dynamic, bool):
        raise SettingsTypeError(
            f"dynamic is {dynamic!r}, expected True or False; a rule goes into rule="
        )
    if rule is not None:
        if initial_scale is not None or growth_steps is not None or not dynamic:
            raise SettingsError(
                "initial_scale, dynamic_growth_steps and dynamic belong to Keras' own rule; with "
                "rule= write them into it, as in rule='keras:init_scale=2^10,growth_interval=500'"
            )
        return resolve(rule, retries=False)
    if isinstance(initial_scale, (bool, str)):
        raise SettingsTypeError(
            f"initial_scale is {initial_scale!r}, expected a number; dynamic, tf.keras' second "
            "argument, is given by name here, and a rule as rule="
        )
    scale = SCALE if initial_scale is None else float(initial_scale)
    if not dynamic:
        if initial_scale is None:
            raise SettingsError(
                "dynamic=False wants initial_scale=, the scale to keep; or do without a "
                "LossScaleOptimizer, and set `loss_scale_factor` on the inner optimizer"
            )
        if growth_steps is not None:
            raise SettingsError(
                f"dynamic_growth_steps is {growth_steps!r} though dynamic=False: a fixed scale "
                "does not grow; leave one of the two out"
            )
    odd = math.isfinite(scale) and not is_power_of_two(scale)
    if odd and scale > 0:
        warn(
            f"initial_scale={scale!r} is not a power of two, so every gradient is rounded once "
            "more when it is unscaled"
        )
    if dynamic:
        return keras_rule(scale, INTERVAL if growth_steps is None else growth_steps)
    if odd:
        return keras_rule(scale, INTERVAL, min_scale=scale, max_scale=scale)
    return Static(scale)


def keras_rule(scale: float, interval: Any, **bounds: float) -> Rule:
    """Keras' own rule from this scale on."""
    odd = math.isfinite(scale) and not is_power_of_two(scale)
    return preset(
        "keras", init_scale=scale, growth_interval=interval, powers_of_two=not odd, **bounds
    )

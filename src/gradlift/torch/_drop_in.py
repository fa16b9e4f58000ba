"""torch's own rule, from torch's own arguments."""

from __future__ import annotations

import math
import warnings

from ..errors import SettingsError, StateError
from ..rules import Backoff, Rule, ScaleState
from ..rules._rule import LARGEST, is_power_of_two


def torch_rule(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float | None,
) -> Backoff:
    """The rule of `torch.amp.GradScaler`, within bounds; what torch accepts is accepted."""
    if not growth_factor > 1.0:
        raise SettingsError(f"growth_factor is {growth_factor!r}, expected more than 1")
    if not 0.0 < backoff_factor < 1.0:
        raise SettingsError(f"backoff_factor is {backoff_factor!r}, expected a number in (0, 1)")
    if not (math.isfinite(init_scale) and init_scale > 0):
        raise SettingsError(f"init_scale is {init_scale!r}, expected a finite number above 0")
    high = LARGEST if max_scale is None else max_scale
    odd = [
        f"{name}={value!r}"
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
        )
        if not is_power_of_two(value)
    ]
    if odd:
        warnings.warn(
            f"{', '.join(odd)}: not a power of two, so every gradient is rounded once more when "
            "it is unscaled",
            stacklevel=3,
        )
    if not min_scale <= init_scale <= high:
        warnings.warn(
            f"init_scale is {init_scale!r}, outside [{min_scale:g}, {high:g}]: the nearest bound "
            "is used",
            stacklevel=3,
        )
    return Backoff(
        init_scale=min(max(init_scale, min_scale), high),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=high,
        powers_of_two=not odd,
    )


def with_scale(rule: Rule, state: ScaleState, scale: float) -> ScaleState:
    """`state` with a scale set by hand, brought inside the rule's bounds."""
    if not (math.isfinite(scale) and scale > 0):
        raise StateError(f"scale is {scale!r}, expected a finite number above 0")
    return state._replace(scale=min(max(scale, rule.min_scale), rule.max_scale))

"""A scale's state as a plain dict: torch's five keys, authoritative, and one of our own.

    scale, growth_factor, backoff_factor, growth_interval, _growth_tracker      torch's
    gradlift: schema, rule, skips, left, level, spread, seen, steps, skipped, sharp

Every adapter saves this layout and loads what another has saved. torch's own scaler loads it too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from ..errors import SettingsError, StateError
from ..rules import Backoff, Rule, ScaleState
from ..rules.base import is_name, is_power_of_two
from ..text import shown

SCHEMA = 1
FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_HISTORY = ("skips", "left", "level", "spread", "seen")  # scale and clean are torch's keys


class Loaded(NamedTuple):
    """A saved state, checked."""

    rule: Rule
    """The rule that was given, with torch's factors as saved where they were to be adopted."""
    state: ScaleState
    steps: int
    skipped: int
    sharp: bool
    own: dict[str, Any]
    """Our own entry, as saved: {} if torch's scaler saved it."""


def save(
    rule: Rule,
    state: ScaleState,
    *,
    steps: int = 0,
    skipped: int = 0,
    sharp: bool = True,
    factors: list[Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The state in Python numbers. `more` is added to our own entry.

    >>> from gradlift.rules import Static
    >>> save(Static(8), Static(8).init())["scale"]
    8.0
    """
    if factors is None:
        source = rule if isinstance(rule, Backoff) else Backoff()  # torch wants some, to ignore
        factors = [getattr(source, name) for name in FACTORS]
    return {
        "scale": float(state.scale),
        **dict(zip(FACTORS, factors)),
        "_growth_tracker": int(state.clean),
        "gradlift": {
            "schema": SCHEMA,
            "rule": rule.name,
            "sharp": sharp,
            **history(state, steps, skipped),
            **more,
        },
    }


def history(state: ScaleState, steps: int, skipped: int) -> dict[str, int]:
    """What torch's keys do not hold.

    >>> history(ScaleState(8.0, skips=2), 10, 3)["skips"]
    2
    """
    held = {name: int(getattr(state, name)) for name in _HISTORY}
    return {**held, "steps": steps, "skipped": skipped}


def load(rule: Rule, data: Any, *, adopt: bool = False) -> Loaded:
    """The state in `data`, checked field by field, or StateError.

    `adopt`: the rule was made from torch's arguments, so that torch's factors are taken over as
    torch does. A rule that was chosen by name keeps its own.

    >>> from gradlift.rules import Backoff
    >>> load(Backoff(), save(Backoff(), Backoff().init(), steps=3)).steps
    3
    """
    if not isinstance(data, dict):
        raise StateError(f"a scaler state is a dict, this is {type(data).__name__}")
    if not data:
        raise StateError("the scaler state is empty: it was saved from a scaler that was disabled")
    for name in ("scale", *FACTORS, "_growth_tracker"):
        if name not in data:
            raise StateError(f"this scaler state lacks {name!r}")
    for name in FACTORS:
        if not _is_number(data[name]):
            raise StateError(f"{name} is {shown(data[name])}, expected a finite number")
    if adopt:
        rule = _with_factors(rule, data)
    own = data.get("gradlift", {})
    if not isinstance(own, dict) or not is_schema(own.get("schema", SCHEMA)):
        raise StateError(
            f"this scaler state's 'gradlift' entry has an unknown schema: {shown(own)}"
        )
    if own and not is_name(own.get("rule"), rule):
        raise StateError(
            f"this scaler state was saved with the rule {shown(own.get('rule'))}, this scaler has "
            f"{rule.name!r}: make the scaler with the same rule"
        )
    if own:
        for name in _HISTORY:
            if name not in own:
                raise StateError(f"this scaler state's 'gradlift' entry lacks {name!r}")
    state = scale_state(rule, data["scale"], data["_growth_tracker"], own)
    return Loaded(rule, state, *counts(own), own.get("sharp") is True, own)


def is_schema(value: Any) -> bool:
    """Is this layout's number: not True, and no array?"""
    return type(value) is int and value == SCHEMA


def scale_state(rule: Rule, scale: Any, clean: Any, own: dict[str, Any]) -> ScaleState:
    """A rule's state out of what was saved of it; torch's and apex's scalers save no history."""
    held = scale
    if _is_number(scale) and scale > 0:
        held = float(scale)
        if rule.min_scale < rule.max_scale:  # torch has no bounds: brought inside ours
            held = min(max(held, rule.min_scale), rule.max_scale)
    elif type(scale) is int:
        held = math.inf if scale > 0 else -1.0  # too large for a float: refused like one
    saved = {name: own[name] for name in _HISTORY if name in own}
    return rule.load({**rule.dump(rule.init()), **saved, "scale": held, "clean": clean})


def counts(own: dict[str, Any]) -> tuple[int, int]:
    """Steps and skipped steps; none if torch's scaler saved it.

    >>> counts({"steps": 3, "skipped": 1})
    (3, 1)
    """
    found = own.get("steps", 0), own.get("skipped", 0)
    if not all(type(n) is int and 0 <= n < 2**31 for n in found):  # 32 bits on a device
        raise StateError(f"steps and skipped are {shown(found)}, expected two counts")
    return found


def _with_factors(rule: Rule, data: dict[str, Any]) -> Rule:
    """torch's rule with the saved factors; torch's scale may be any number."""
    if not isinstance(rule, Backoff):
        return rule
    growth, backoff, interval = (data[name] for name in FACTORS)
    scale = data["scale"]
    numbers = [growth, backoff, *([scale] if _is_number(scale) and scale > 0 else [])]
    powers = rule.powers_of_two and all(map(is_power_of_two, numbers))
    powers = powers and growth != 1 and backoff != 1  # torch takes 1 from its setters
    try:
        return dataclasses.replace(
            rule,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            powers_of_two=powers,
        )
    except SettingsError as error:
        raise StateError(str(error)) from error


def _is_number(x: Any) -> bool:
    if type(x) is float:
        return math.isfinite(x)
    return type(x) is int and abs(x) < 2**127

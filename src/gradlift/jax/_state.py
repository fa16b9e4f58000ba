"""A scaler's state as a plain dict: what `gradlift.torch.GradScaler` saves and loads."""

from __future__ import annotations

import math
from typing import Any

from ..errors import StateError
from ..rules import Backoff, Rule, ScaleState

SCHEMA = 1
_HISTORY = ("skips", "left", "level", "spread", "seen")  # scale and clean are torch's keys
_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def save(rule: Rule, state: ScaleState) -> dict[str, Any]:
    """The state in Python numbers."""
    factors = rule if isinstance(rule, Backoff) else Backoff()  # torch wants some, and ignores them
    return {
        "scale": float(state.scale),
        "growth_factor": factors.growth_factor,
        "backoff_factor": factors.backoff_factor,
        "growth_interval": factors.growth_interval,
        "_growth_tracker": int(state.clean),
        "gradlift": {
            "schema": SCHEMA,
            "rule": rule.name,
            **{name: int(getattr(state, name)) for name in _HISTORY},
        },
    }


def load(rule: Rule, data: Any) -> ScaleState:
    """The state in `data`, checked field by field. torch's own scaler has no history of ours."""
    if not isinstance(data, dict):
        raise StateError(f"a scaler state is a dict, this is {type(data).__name__}")
    for name in _TORCH:
        if name not in data:
            raise StateError(f"this scaler state lacks {name!r}")
    own = data.get("gradlift", {})
    if not isinstance(own, dict) or own.get("schema", SCHEMA) != SCHEMA:
        raise StateError(f"this scaler state's 'gradlift' entry has an unknown schema: {own!r:.80}")
    fresh = rule.dump(rule.init())
    if own:
        for name in _HISTORY:
            if name not in own:
                raise StateError(f"this scaler state's 'gradlift' entry lacks {name!r}")
        fresh = {**fresh, "rule": own.get("rule"), **{name: own[name] for name in _HISTORY}}
    if isinstance(rule, Backoff):
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if data[name] != getattr(rule, name):
                raise StateError(
                    f"this scaler state was saved with {name}={data[name]!r}, this rule has "
                    f"{getattr(rule, name)!r}: make the scaler with a rule of the same factors"
                )
    scale = data["scale"]
    known = type(scale) is float and math.isfinite(scale) and scale > 0
    if known and rule.min_scale < rule.max_scale:
        scale = min(max(scale, rule.min_scale), rule.max_scale)  # torch's scaler has no bounds
    return rule.load({**fresh, "scale": scale, "clean": data["_growth_tracker"]})

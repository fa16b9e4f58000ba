"""apex's checkpoint: `loss_scaler0`, ..., each `{loss_scale, unskipped}`."""

from __future__ import annotations

import json
from typing import Any

from ..core.state import history
from ..errors import StateError, warn
from ..text import shown
from .session import Amp


def save(amp: Amp) -> dict[str, dict[str, Any]]:
    """Of every loss; another rule than apex's has its history under "gradlift" besides."""
    saved: dict[str, dict[str, Any]] = {}
    if amp.scaler is None:
        return saved
    own = amp.scaler.state_dict()["gradlift"]
    for i in range(amp.num_losses):
        scale = amp.scaler.scale_of(amp.key(i))
        state = scale.numbers()
        saved[f"loss_scaler{i}"] = {"loss_scale": state.scale, "unskipped": state.clean}
        if amp.scaler.rule != amp.own_rule:
            saved[f"loss_scaler{i}"]["gradlift"] = {
                **history(state, scale.steps, scale.home.skipped),
                "rule": own["rule"],
                "sharp": own["sharp"],
            }
    return saved


def load(amp: Amp, data: Any) -> None:
    """Loads what apex or `save` saved; damage is refused and changes nothing."""
    if amp.scaler is None:
        return
    if not isinstance(data, dict):
        raise StateError(f"an amp state is a dict, this is {type(data).__name__}")
    odd = [key for key in data if "loss_scaler" not in str(key)]
    if odd:
        raise StateError(f"this amp state has unexpected keys: {', '.join(map(shown, odd[:5]))}")
    if len(data) != amp.num_losses:
        warn(
            f"this amp state has {len(data)} loss scalers, amp.initialize was called for "
            f"{amp.num_losses} losses: the first {min(len(data), amp.num_losses)} are loaded"
        )
    state = amp.scaler.state_dict()
    own = state["gradlift"]
    keys = json.loads(own["keys"])
    for i, (name, entry) in zip(range(amp.num_losses), data.items()):
        if not isinstance(entry, dict) or not {"loss_scale", "unskipped"} <= {*entry}:
            raise StateError(f"{name} is {shown(entry)}, expected a loss_scale and unskipped")
        saved = entry.get("gradlift", {})
        if not isinstance(saved, dict):
            raise StateError(f"{name}'s history is {shown(saved)}, expected a dict")
        own |= {k: saved[k] for k in ("rule", "sharp") if k in saved}
        past = {k: v for k, v in saved.items() if k not in ("rule", "sharp")}
        key = amp.key(i)
        if key is None:
            own |= past
            state |= {"scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]}
        else:
            now = {"scale": entry["loss_scale"], "clean": entry["unskipped"]}
            keys[key] = {**keys.get(key, {}), **past, **now}
    own["keys"] = json.dumps(keys, default=shown)  # what JSON cannot hold is refused as a text
    amp.scaler.load_state_dict(state)

"""apex's checkpoint: `loss_scaler0`, ..., each `{loss_scale, unskipped}`."""

from __future__ import annotations

import json
import warnings
from typing import Any

from ...errors import StateError
from ._session import Amp


def save(amp: Amp) -> dict[str, dict[str, Any]]:
    """Of every loss; another rule than apex's has its history under "gradlift" besides."""
    if amp.scaler is None:
        return {}
    state = amp.scaler.state_dict()
    own = amp.scaler._rule == amp.own_rule
    saved = {}
    for i in range(amp.num_losses):
        entry = _entry(amp, state, i)
        saved[f"loss_scaler{i}"] = {"loss_scale": entry["scale"], "unskipped": entry["clean"]}
        if not own:
            history = {k: v for k, v in entry.items() if k not in ("scale", "clean")}
            history |= {k: state["gradlift"][k] for k in ("rule", "sharp")}
            saved[f"loss_scaler{i}"]["gradlift"] = history
    return saved


def _entry(amp: Amp, state: dict[str, Any], loss_id: int) -> dict[str, Any]:
    key, own = amp.key(loss_id), state["gradlift"]
    if key is not None:
        assert amp.scaler is not None
        amp.scaler._track(key)
        return json.loads(own["keys"]).get(key) or {"scale": amp.scaler.get_scale(key), "clean": 0}
    lists = ("schema", "rule", "sharp", "keys", "events")
    history = {k: v for k, v in own.items() if k not in lists}
    return {"scale": state["scale"], "clean": state["_growth_tracker"], **history}


def load(amp: Amp, data: Any) -> None:
    """Loads what apex or `save` saved; damage is refused and changes nothing."""
    if amp.scaler is None:
        return
    if not isinstance(data, dict):
        raise StateError(f"an amp state is a dict, this is {type(data).__name__}")
    odd = [key for key in data if "loss_scaler" not in str(key)]
    if odd:
        raise StateError(f"this amp state has unexpected keys: {', '.join(map(repr, odd))}")
    if len(data) != amp.num_losses:
        warnings.warn(
            f"this amp state has {len(data)} loss scalers, amp.initialize was told of "
            f"{amp.num_losses} losses: the first {min(len(data), amp.num_losses)} are loaded",
            stacklevel=3,
        )
    state = amp.scaler.state_dict()
    for i, (name, entry) in enumerate(data.items()):
        if i < amp.num_losses:
            _put(amp, state, i, name, entry)
    amp.scaler.load_state_dict(state)


def _put(amp: Amp, state: dict[str, Any], loss_id: int, name: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not {"loss_scale", "unskipped"} <= {*entry}:
        raise StateError(f"{name} is {entry!r:.80}, expected a loss_scale and unskipped")
    history = entry.get("gradlift", {})
    if not isinstance(history, dict):
        raise StateError(f"{name}'s history is {history!r:.80}, expected a dict")
    own = state["gradlift"]
    own |= {k: history[k] for k in ("rule", "sharp") if k in history}
    history = {k: v for k, v in history.items() if k not in ("rule", "sharp")}
    key = amp.key(loss_id)
    if key is None:
        state |= {"scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]}
        own |= history
    else:
        merged = {**_entry(amp, state, loss_id), **history}
        here = {**merged, "scale": entry["loss_scale"], "clean": entry["unskipped"]}
        try:
            own["keys"] = json.dumps({**json.loads(own["keys"]), key: here})
        except TypeError:  # neither a number nor anything else that a state may hold
            raise StateError(f"{name} is {entry!r:.80}, expected two numbers") from None

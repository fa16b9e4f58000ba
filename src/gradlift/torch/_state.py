"""A scaler's state as a plain dict: torch's five keys, authoritative, and one of our own.

What grows with the run (keys, events) is one text each: `torch.distributed.checkpoint` takes a dict
apart, and loads only what the scaler that is to be loaded has as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError, StateError
from ..journal import Event
from ..rules import ScaleState
from ..rules._rule import is_power_of_two

if TYPE_CHECKING:
    from ._drop_in import DropIn

SCHEMA = 1
_HISTORY = ("skips", "left", "level", "spread", "seen")  # scale and clean are torch's keys


def save(scaler: DropIn) -> dict[str, Any]:
    scaler._report.flush()
    growth, backoff, interval = scaler._factors
    state = scaler._track(None).numbers()
    return {
        "scale": float(state.scale),
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": int(state.clean),
        "gradlift": {
            "schema": SCHEMA,
            "rule": scaler._rule.name,
            "sharp": scaler._sharp is None,
            **_own(scaler, None),
            "keys": json.dumps(_keys(scaler)),
            "events": json.dumps([[e.step, e.what, e.detail] for e in scaler.events]),
        },
    }


def _keys(scaler: DropIn) -> dict[str, Any]:
    return {
        key: {"scale": t.numbers().scale, "clean": t.numbers().clean, **_own(scaler, key)}
        for key, t in scaler._tracks.items()
        if key is not None
    }


def _own(scaler: DropIn, key: str | None) -> dict[str, Any]:
    track = scaler._tracks[key]
    state = track.numbers()
    return {
        **{name: int(getattr(state, name)) for name in _HISTORY},
        "steps": track.steps,
        "skipped": track.skipped_steps(),
    }


def load(scaler: DropIn, data: Any) -> None:
    """Everything is checked before anything is changed."""
    if not isinstance(data, dict) or not data:
        raise StateError(
            "the scaler state is empty: it was saved from a scaler that was disabled"
            if data == {}
            else f"a scaler state is a dict, this is {type(data).__name__}"
        )
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        if name not in data:
            raise StateError(f"this scaler state lacks {name!r}")
    factors = [data["growth_factor"], data["backoff_factor"], data["growth_interval"]]
    for name, value in zip(("growth_factor", "backoff_factor", "growth_interval"), factors):
        if not _is_number(value):
            raise StateError(f"{name} is {value!r}, expected a finite number")
    rule = scaler._rule
    if scaler._torch_rule:
        rule = _rule_with(rule, factors, data["scale"])
    own = data.get("gradlift", {})
    if not isinstance(own, dict) or own.get("schema", SCHEMA) != SCHEMA:
        raise StateError(f"this scaler state's 'gradlift' entry has an unknown schema: {own!r:.80}")
    same_rule = own.get("rule") == rule.name
    if own and not same_rule:
        raise StateError(
            f"this scaler state was saved with the rule {own.get('rule')!r}, this scaler has "
            f"{rule.name!r}: make the scaler with the same rule"
        )
    states = {None: _state(rule, data["scale"], data["_growth_tracker"], own)}
    counts = {None: _counts(own)}
    keys, told = _parsed(own.get("keys", "{}")), _parsed(own.get("events", "[]"))
    if not isinstance(keys, dict) or not isinstance(told, list):
        raise StateError("this scaler state's keys or events are damaged")
    for key, entry in keys.items():
        if not isinstance(entry, dict):
            raise StateError(f"the state of key {key!r} is {type(entry).__name__}, expected a dict")
        states[key] = _state(rule, entry.get("scale"), entry.get("clean"), entry)
        counts[key] = _counts(entry)
    events = [_event(e) for e in told]

    if own.get("sharp") is True and scaler._sharp is not None:
        scaler._sharpen()
        rule = scaler._rule
    scaler._arguments = factors
    scaler._tracks = {None: scaler._tracks[None]}
    scaler._use_rule(rule)
    for key, state in states.items():
        track = scaler._track(key)
        track.rule = rule
        track.clear()  # gradients made at another scale are of no use any more
        track.put(state)
        track.steps, track.skipped = counts[key]
        if hasattr(track, "skips_seen"):
            track.skips_seen.fill_(track.skipped)
    scaler._report.events.clear()
    scaler._report.events.extend(events)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None  # refused by whoever expected something


def _is_number(x: Any) -> bool:
    if type(x) is float:
        return math.isfinite(x)
    return type(x) is int and abs(x) < 2**127


def _rule_with(rule: Any, factors: list[Any], scale: Any) -> Any:
    """torch's rule with the loaded factors; torch's scale may be any number."""
    growth, backoff, interval = factors
    numbers = [growth, backoff, *([scale] if _is_number(scale) and scale > 0 else [])]
    powers = rule.powers_of_two and all(map(is_power_of_two, numbers))
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


def _state(rule: Any, scale: Any, clean: Any, own: dict[str, Any]) -> ScaleState:
    fresh = rule.init()
    held = scale
    if _is_number(scale) and scale > 0:  # torch has no bounds: brought inside ours
        held = min(max(float(scale), rule.min_scale), rule.max_scale)
    elif type(scale) is int:
        held = math.inf if scale > 0 else -1.0  # too large for a float: refused like one
    data = {
        **rule.dump(fresh),
        **{name: own[name] for name in _HISTORY if name in own},
        "scale": held,
        "clean": clean,
    }
    return rule.load(data)


def _counts(own: dict[str, Any]) -> tuple[int, int]:
    counts = own.get("steps", 0), own.get("skipped", 0)
    if not all(type(n) is int and n >= 0 for n in counts):
        raise StateError(f"steps and skipped are {counts}, expected two counts")
    return counts


def _event(data: Any) -> Event:
    try:
        step, what, detail = data
        return Event(step, str(what), dict(detail))
    except (TypeError, ValueError) as error:
        raise StateError(f"an event is {data!r:.80}, expected [step, what, detail]") from error

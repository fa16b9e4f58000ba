"""A scaler's state: the layout of `core.state`, with the other keys and the events beside it.

What grows with the run (keys, events) is one text each: `torch.distributed.checkpoint` takes a dict
apart, and loads only what the scaler that is to be loaded has as well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ...core import state as saved_state
from ...errors import StateError
from ...journal.records import event_of
from ...text import shown
from .settings import plain_number

if TYPE_CHECKING:
    from .grad_scaler import GradScaler


def save(scaler: GradScaler) -> dict[str, Any]:
    scaler.flush()
    settings, scale = scaler._settings, scaler._scales[None]
    return saved_state.save(
        settings.rule,
        scale.numbers(),
        steps=scale.steps,
        skipped=scale.home.skipped,
        sharp=settings.sharp is None,
        factors=scaler._factors,
        keys=json.dumps(_keys(scaler)),
        events=json.dumps([[e.step, e.what, e.detail] for e in scaler.events]),
    )


def _keys(scaler: GradScaler) -> dict[str, Any]:
    found = {}
    for key, scale in scaler._scales.items():
        if key is not None:
            state = scale.numbers()
            own = saved_state.history(state, scale.steps, scale.home.skipped)
            found[key] = {"scale": state.scale, "clean": state.clean, **own}
    return found


def load(scaler: GradScaler, data: Any) -> None:
    """Everything is checked before anything is changed."""
    if isinstance(data, dict):
        data = {name: plain_number(value) for name, value in data.items()}
    loaded = saved_state.load(scaler.rule, data, adopt=scaler._torch_rule)
    rule, own = loaded.rule, loaded.own
    states = {None: (loaded.state, loaded.steps, loaded.skipped)}
    keys, listed = _parsed(own.get("keys", "{}")), _parsed(own.get("events", "[]"))
    if not isinstance(keys, dict) or not isinstance(listed, list):
        raise StateError("this scaler state's keys or events are damaged")
    for key, entry in keys.items():
        if not isinstance(entry, dict):
            raise StateError(
                f"the state of key {shown(key)} is {type(entry).__name__}, expected a dict"
            )
        state = saved_state.scale_state(rule, entry.get("scale"), entry.get("clean"), entry)
        states[key] = state, *saved_state.counts(entry)
    events = [_event(entry) for entry in listed]

    if loaded.sharp and scaler._settings.sharp is not None:
        scaler._sharpen()
        rule = scaler.rule
    scaler._arguments = [data[name] for name in saved_state.FACTORS]
    stale = any(scale.calls or scale.windows for scale in scaler._scales.values())
    scaler._scales, scaler._settings.by_hand = {None: scaler._scales[None]}, False
    scaler.use_rule(rule)
    for key, (state, steps, skipped) in states.items():
        scale = scaler.scale_of(key)
        scale.clear()  # gradients made at another scale are of no use any more
        scale.stale = stale
        scale.put(state)
        scale.steps, scale.home.skipped = steps, skipped
    scaler._settings.channel.events.clear()
    scaler._settings.channel.events.extend(events)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None  # refused by whoever expected something


def _event(data: Any) -> Any:
    try:
        return event_of(*data)
    except (TypeError, ValueError) as error:
        raise StateError(f"an event is {shown(data)}, expected [step, what, detail]") from error

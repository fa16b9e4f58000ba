"""An optimizer's variables in a file: checked before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SettingsError, StateError
from ..rules import Backoff, Rule, ScaleState, parse
from ..rules.base import SCHEMA
from .step_record import Values, counts_of, state_of


def rule_bytes(rule: Rule) -> Any:
    """A rule's text as an array: a store holds nothing else."""
    return np.frombuffer(str(rule).encode(), np.uint8)


def checked(
    store: Any, rule: Rule, shapes: list[tuple[int, ...]], kept: list[int]
) -> dict[int, Any] | None:
    """The values by place, if they are sound and this rule's; None if they are another model's.

    `kept` are the places of scale, clean steps, history and ring. Keras' own class saves no
    history: then only what it knows is taken.
    """
    names = {str(name) for name in store.keys()}  # noqa: SIM118  (no mapping)
    places, ours = list(range(len(shapes))), "rule" in names
    if not ours:
        places = [i for i in places if i not in kept[2:]]
    if len(names) - ours != len(places):
        return None
    found = {place: np.asarray(store[str(n)]) for n, place in enumerate(places)}
    for place, value in found.items():
        if value.shape != shapes[place]:
            raise StateError(
                f"the saved optimizer's variable {place} has shape {value.shape}, expected "
                f"{shapes[place]}: it was saved with another model"
            )
        _check_numbers(place, value, ring=place == kept[3])
    scale, clean = float(found[kept[0]]), int(found[kept[1]])
    if not ours:
        if not isinstance(rule, Backoff):  # to others `clean` does not mean what it means to Keras
            clean, found[kept[1]] = 0, np.zeros_like(found[kept[1]])
        _check(rule, rule.init()._replace(scale=scale, clean=clean))
        return found
    history = [int(x) for x in found[kept[2]]]
    _same(rule, bytes(np.asarray(store["rule"])))
    _check(rule, state_of(Values(scale, clean, history, None)))
    if min(counts_of(history)) < 0:
        raise StateError("the saved optimizer's counts are negative: the file is damaged")
    return found


def _check_numbers(place: int, value: Any, *, ring: bool) -> None:
    """A moment that is not finite would be in the weights after one step. The ring has NaN where
    something is not known."""
    real = value.dtype.kind in "fiub" or "float" in value.dtype.name  # bfloat16 has no kind
    if not real:
        raise StateError(
            f"the saved optimizer's variable {place} holds {value.dtype}, expected numbers: the "
            "file is damaged"
        )
    finite = ring | np.isfinite(value.astype(np.float64))
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise StateError(
            f"the saved optimizer's variable {place} is {value[at]} at {list(at)}: it would be in "
            "the weights after one step. Load an earlier file, or build the optimizer anew and "
            "load the model's weights alone"
        )


def _check(rule: Rule, state: ScaleState) -> None:
    rule.load({"schema": SCHEMA, "rule": rule.name, **state._asdict()})


def _same(rule: Rule, text: bytes) -> None:
    try:
        saved = parse(text.decode())
    except (SettingsError, UnicodeDecodeError) as error:
        raise StateError(f"the saved optimizer names a rule that cannot be read: {error}") from None
    if saved.name != rule.name:
        raise StateError(
            f"the saved optimizer used the rule '{saved}', whose history '{rule}' cannot read: "
            "compile with the rule it was saved with"
        )

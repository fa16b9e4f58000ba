"""A scaler's state as a plain dict, and how it travels in the trainer's state file.

`trainer.save_states` pickles the optimizer with all its attributes: one of them is ours.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import StateError
from ..rules import Rule, ScaleState

if TYPE_CHECKING:
    from ._scaler import Scaler

ATTRIBUTE = "_gradlift"
_SCHEMA = 1


def dump(scaler: Scaler) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "rule": str(scaler.rule),
        "state": scaler.rule.dump(scaler.state),
        "steps": scaler.steps,
        "skipped_steps": scaler.skipped_steps,
    }


def checked(data: Any, rule: Rule) -> tuple[ScaleState, int, int]:
    """The rule's state and the counts of steps and skipped ones, or StateError."""
    if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
        raise StateError("this is not the state_dict() of a gradlift.mxnet scaler")
    steps, skipped = data.get("steps"), data.get("skipped_steps")
    for name, n in (("steps", steps), ("skipped_steps", skipped)):
        if type(n) is not int or n < 0:
            raise StateError(f"{name} is {n!r}, expected a count")
    return rule.load(data.get("state")), steps, skipped  # type: ignore[return-value]


def belongs(data: Any, rule: Rule) -> bool:
    """Was it saved by a rule of this kind?"""
    state = data.get("state") if isinstance(data, dict) else None
    return isinstance(state, dict) and state.get("rule") == rule.name


def in_file(name: str) -> Any:
    """What a trainer's state file holds of ours; None if it was saved without."""
    with open(name, "rb") as file:
        try:
            saved = pickle.load(file)
        except Exception as error:  # a damaged pickle raises what it likes
            raise StateError(
                f"{name} cannot be read, it may be damaged ({type(error).__name__}: {error})"
            ) from error
    if isinstance(saved, dict):  # without an optimizer
        return None
    if not isinstance(saved, tuple) or len(saved) != 2:
        raise StateError(f"{name} was not written by trainer.save_states()")
    return getattr(saved[1], ATTRIBUTE, None)


class Travelling:
    """Pickled, it is the state as a plain dict: MXNet alone can read the file."""

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dump(self.scaler),)

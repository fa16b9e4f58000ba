"""How a scaler's state is saved in the trainer's state file.

`trainer.save_states` pickles the optimizer with all its attributes: one of them is ours.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from ..errors import StateError
from ..rules import Rule

if TYPE_CHECKING:
    from .scaler import Scaler

ATTRIBUTE = "_gradlift"


def of_rule(data: Any, rule: Rule) -> bool:
    """Was this state saved by a rule of this kind?"""
    own = data.get("gradlift") if isinstance(data, dict) else None
    return isinstance(own, dict) and own.get("rule") == rule.name


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


class SavedWithTrainer:
    """Pickled, it is the state as a plain dict: MXNet alone can read the file."""

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.scaler.state_dict(),)

"""How a scaler's state is saved in the trainer's state file.

`trainer.save_states` pickles the optimizer with all its attributes: one of them is ours. MXNet
alone reads that pickle; ours is looked at afterwards, and a file that is refused is undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mxnet import nd

from ..errors import StateError
from ..rules import Rule
from ..rules.base import is_name

if TYPE_CHECKING:
    from .scaler import Scaler

ATTRIBUTE = "_gradlift"


def of_rule(data: Any, rule: Rule) -> bool:
    """Was this state saved by a rule of this kind?"""
    own = data.get("gradlift") if isinstance(data, dict) else None
    return isinstance(own, dict) and is_name(own.get("rule"), rule)


class SavedWithTrainer:
    """Pickled, it is the state as a plain dict: MXNet alone can read the file."""

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.scaler.state_dict(),)


class BeforeLoading:
    """What `trainer.load_states` exchanges. It exchanges objects and writes into none of them, so
    that keeping the old ones is enough to undo it."""

    def __init__(self, trainer: Any) -> None:
        if not trainer._kv_initialized:  # load_states would do so
            trainer._init_kvstore()
        self.trainer, self.optimizer = trainer, trainer._optimizer
        stored = getattr(trainer._kvstore, "_updater", None)
        self.updaters = [
            (updater, updater.states, updater.states_synced, updater.optimizer)
            for updater in [*trainer._updaters, *([stored] if stored is not None else [])]
        ]

    def undo(self) -> None:
        self.trainer._optimizer = self.optimizer
        for updater, *held in self.updaters:
            updater.states, updater.states_synced, updater.optimizer = held


def _arrays(held: Any) -> list[Any]:
    """Arrays in an optimizer's state of one parameter: an array, None, or tuples of them."""
    if isinstance(held, (tuple, list)):
        return [array for each in held for array in _arrays(each)]
    return [held] if isinstance(held, nd.NDArray) and held.dtype != np.int32 else []


def load_states(trainer: Any, name: str) -> Any:
    """Loads a trainer's file as MXNet does; returns what it holds of ours, None if nothing."""
    try:
        type(trainer).load_states(trainer, name)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises what it likes
        raise StateError(
            f"{name} cannot be read: it is damaged, or was not written by trainer.save_states() "
            f"({type(error).__name__}: {error})"
        ) from error
    for updater in trainer._updaters:
        for index, held in updater.states.items():
            if any(not np.isfinite(array.asnumpy()).all() for array in _arrays(held)):
                raise StateError(
                    f"{name} holds inf or nan in the optimizer's state of "
                    f"{trainer._params[index].name}: load an earlier file. "
                    "Trainer.load_states(trainer, name) loads this one as it is"
                )
    found = getattr(trainer._optimizer, ATTRIBUTE, None)
    return None if isinstance(found, SavedWithTrainer) else found  # saved without an optimizer

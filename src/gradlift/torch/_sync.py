"""Are all ranks in the same state? Asked for by name, so it may take its time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import RankError
from ._agree import differing, in_words
from ._circle import ranks_of, resolved
from ._shards import distributed

if TYPE_CHECKING:
    from ._drop_in import DropIn

_WHAT_TO_DO = (
    "From here on they would scale, skip and step differently. Load the same scaler state on every "
    "rank (save it on one, load it on all), and pass process_group= so that they decide together"
)


def facts(scaler: DropIn) -> dict[str, Any]:
    """What must be equal, by name, the most telling first."""
    if not scaler._active:
        return {"switches": "off"}
    told: dict[str, Any] = {"switches": "on"}
    tracks = {"" if key is None else f" of {key!r}": t for key, t in scaler._tracks.items()}
    states = {of: tracks[of].numbers() for of in sorted(tracks)}
    for of, state in states.items():
        told[f"scales{of}"] = float(state.scale)
    told["rules"] = re.sub(r"(?<=[:,])init_scale=[^,]*,?", "", str(scaler._rule))  # history by now
    for of, state in states.items():
        counters = {name: int(n) for name, n in state._asdict().items() if name != "scale"}
        told.update({f"counters {name!r}{of}": n for name, n in counters.items()})
        told[f"steps{of}"], told[f"skipped steps{of}"] = (
            tracks[of].steps,
            tracks[of].skipped_steps(),
        )
    return told


def assert_in_sync(scaler: DropIn, group: Any) -> None:
    if not distributed():
        return
    group = group if group is not None else resolved(scaler._group) or dist.group.WORLD
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return
    everyone: list[Any] = [None] * len(ranks)
    with in_words(ranks):
        dist.all_gather_object(everyone, facts(scaler), group=group)
    for name in dict.fromkeys(name for told in everyone for name in told):
        values = [told.get(name, "none") for told in everyone]
        if len({*values}) > 1:
            raise RankError(f"{differing(name, ranks, values)}. {_WHAT_TO_DO}")

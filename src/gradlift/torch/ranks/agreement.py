"""One small collective a step, so that every rank takes the same decision.

Each rank contributes twelve numbers; all ranks receive all rows (all_gather) and reduce them
locally: a MAX over the network may lose a NaN, and a gather shows which rank has what.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import loss_blamed
from ...errors import MisuseError, RankError
from ...reading import NAN, Reading
from .group import RankGroup, listed, ranks_of, resolved
from .sharding import distributed

if TYPE_CHECKING:
    from ..scaler.settings import DropIn

NOT_TAKEN = -1.0
LEFT, BEGINS = 0.0, -1.0  # in place of a scale: the rank has no batch left, or begins a pass
NORM, AMAX, CLIPS, WATCHED = 1, 2, 4, 8  # bits of what a rank asks for


def world_size(group: Any) -> int:
    """How many ranks there are, in a group or in all."""
    return dist.get_world_size(group) if distributed() else 1


class RankRow(NamedTuple):
    """What one rank contributes; numbers, or 0-d tensors on a device."""

    nonfinite: Any
    loss_level: Any
    """0 if all its losses were finite, 2 if none was, else 1."""
    scaled: Any
    """2 if it has scaled a loss, 1 if it may have done so by hand, 0 if it has not: the first stage
    of a pipeline never does."""
    checked: Any
    amax: Any = NOT_TAKEN
    probe_amax: Any = NOT_TAKEN
    own_norm: Any = NOT_TAKEN
    """Norm of what only some ranks hold, weighted so that the squares of all ranks add up."""
    shared_norm: Any = NOT_TAKEN
    """Norm of what every rank holds."""
    culprit: Any = 0
    """Twice the position of the first non-finite parameter, plus 1 for inf or 2 for NaN."""
    asks: Any = 0
    scale: Any = 1.0
    layout: Any = 0


class Agreed(NamedTuple):
    """What all ranks show together; numbers, or 0-d tensors on a device."""

    reading: Reading
    loss_known: Any
    culprit: Any
    """As contributed by the rank whose parameter backward reached first."""


uneven: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups inside `GradScaler.join`, some ranks of which may have left."""


@contextlib.contextmanager
def in_words(ranks: Iterable[int], call: str) -> Iterator[None]:
    """What a backend has to say of a rank that is lost, with what it means and what to do."""
    began = time.monotonic()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "No backend type" in str(error):
            raise MisuseError(
                f"the process group cannot carry what is to be said: {error}. Make it with a "
                'backend for each device: init_process_group("cpu:gloo,cuda:nccl")'
            ) from error
        raise RankError(
            f"{call}: ranks {listed(ranks)} could not agree; the collective failed after "
            f"{time.monotonic() - began:.1f} s: {error!s:.300}. One of them has died, hangs, or "
            "did not come to the same call: the log of the rank that ended first says why. Nothing "
            "was stepped here. Restart from the last checkpoint; how long ranks wait is "
            "init_process_group(timeout=...)"
        ) from error


def gather(packed: Tensor, group: RankGroup) -> Tensor:
    """One row a rank, in the order of the group."""
    if group.group in uneven:
        return _gather_uneven(packed, group)
    return _gathered(packed, group.group, group.ranks, group.call)


def _gathered(row: Tensor, group: Any, ranks: Sequence[int], call: str) -> Tensor:
    table = row.new_empty(len(ranks), row.numel())
    with in_words(ranks, call):
        dist.all_gather(list(table.unbind(0)), row, group=group)
    return table


def _gather_uneven(packed: Tensor, group: RankGroup) -> Tensor:
    """Ranks that have left do not know what is gathered: every row has the same form. This waits
    for a device."""
    row = packed.new_ones(len(RankRow._fields), dtype=torch.float64)
    row[: packed.numel()] = packed
    table = _gathered(row, group.group, group.ranks, group.call)
    same_call(table, group.ranks, group.call)
    return table[:, : packed.numel()].to(packed.dtype)


def stand_in(kind: float, group: Any, device: torch.device, call: str) -> bool:
    """The row of a rank that has left, or that begins a pass; are the others beginning one too?"""
    row = RankRow(False, 0, 0, False, own_norm=0.0, scale=kind)
    ranks = tuple(ranks_of(group))
    packed = torch.tensor([float(x) for x in row], dtype=torch.float64, device=device)
    return same_call(_gathered(packed, group, ranks, call), ranks, call)


def same_call(table: Tensor, ranks: Sequence[int], call: str) -> bool:
    """Do the ranks that are there begin a forward pass? Raises if only some of them do."""
    kinds = {r: kind for r, kind in zip(ranks, table[:, _SCALE].tolist()) if kind != LEFT}
    begin = [kind == BEGINS for kind in kinds.values()]
    if any(begin) and not all(begin):
        calls = ["the next forward pass" if b else "a step" for b in begin]
        raise RankError(
            f"{call}: {differing('calls', kinds, calls)}. Inside scaler.join() all ranks that "
            "still have batches call unscale_(), clip_grad_norm_() and step() equally often for "
            "each forward pass"
        )
    return all(begin)


def agree(mine: RankRow, group: RankGroup, device: torch.device | None = None) -> Agreed:
    """All rows, combined. Without a device in numbers, by way of float64; on a device in float32
    tensors, where nothing waits but the comparison, once after a scale was set by hand. Should
    scales differ there nevertheless, no rank steps."""
    if group.group not in uneven:
        group.refuse_join()
    if device is None:
        row = [NOT_TAKEN if x != x else float(x) for x in mine]
        table = gather(torch.tensor(row, dtype=torch.float64), group)
    else:
        table = gather(packed(mine, device), group)
    forgotten = group.scales and not mine.scaled  # a loss, in the last window
    group.scales = bool(mine.scaled)
    if device is None or not group.compared or forgotten:
        rows = {r: RankRow(*row) for r, row in zip(group.ranks, table.tolist())}
        compare({r: row for r, row in rows.items() if row.scale != LEFT}, group)
    top = RankRow(*table.amax(0))
    own = torch.cat([table[:, _OWN_NORM], top.shared_norm.reshape(1)])
    most = own.amax().clamp(min=torch.finfo(table.dtype).tiny)
    norm = torch.linalg.vector_norm(own / most) * most  # a square might leave the format
    scales = table[:, _SCALE]
    differs = torch.where(scales == LEFT, top.scale, scales).amin() != top.scale
    unscaled = (top.scaled == 0).logical_and(top.checked > 0)  # raises where it was forgotten
    nonfinite = (top.nonfinite > 0).logical_or(differs).logical_or(unscaled)
    blamed = loss_blamed(top.loss_level, top.nonfinite)
    known = top.scaled > (1 if group.sees_all_losses else 2)
    reading = Reading(
        nonfinite,
        loss_nonfinite=blamed,
        checked=top.checked > 0,
        amax=torch.where(top.amax < 0, math.inf, top.amax),
        probe_amax=torch.where(top.probe_amax < 0, NAN, top.probe_amax),
        norm=torch.where(own.amin() < 0, math.nan, norm),
    )
    agreed = Agreed(reading, known, top.culprit)
    return agreed if device is not None else _in_numbers(agreed)


_OWN_NORM, _SCALE = (RankRow._fields.index(name) for name in ("own_norm", "scale"))


def _in_numbers(agreed: Agreed) -> Agreed:
    values = torch.stack([x.double() for x in (*agreed.reading, *agreed[1:])]).tolist()
    bad, amax, loss_bad, checked, norm, probe, known, culprit = values
    norm, probe = math.nan if bad else norm, NAN if math.isnan(probe) else probe
    reading = Reading(bad > 0, amax, loss_bad > 0, checked > 0, norm, probe)
    return Agreed(reading, known > 0, int(culprit))


def packed(numbers: Iterable[Any], device: torch.device) -> Tensor:
    """Scalars as one float32 tensor; a number is filled in on the device, as sending it there
    would wait."""
    return torch.stack(
        [
            x.to(device, non_blocking=True).reshape(()).float()
            if isinstance(x, Tensor)
            else torch.full((), float(x), device=device)
            for x in numbers
        ]
    )


def compare(by_rank: dict[int, RankRow], group: RankGroup) -> None:
    """All ranks see the same rows, so if they differ all raise the same error at the same time."""
    ranks, rows, asks = list(by_rank), list(by_rank.values()), 0
    for row in rows:
        asks |= int(row.asks)
    if group.has_shards:  # else what the asking rank has is what all have
        group.asked_norm, group.asked_amax = bool(asks & (NORM | WATCHED)), bool(asks & AMAX)
        group.shows_norm = bool(asks & NORM)
    if len({row.scale for row in rows}) > 1:
        raise RankError(
            f"{differing('scales', ranks, [row.scale for row in rows])}. Their gradients "
            "cannot be added up. Load the same scaler state on every rank, set scales by hand on "
            "all or none, compute losses in float32 (a float16 loss caps the scale of the rank "
            "that scales it), and if optimizers lie on different meshes, or some of them on none, "
            "pass process_group= with all ranks"
        )
    clips = ["clipping" if int(row.asks) & CLIPS else "no clipping" for row in rows]
    if len({*clips}) > 1:
        raise RankError(
            f"{differing('calls', ranks, clips)}. Their weights would part. Call "
            "clip_grad_norm_(), or step() with max_norm=, on every rank or on none"
        )
    layouts = [int(row.layout) for row in rows]
    if len({*layouts} - {0}) > 1:
        raise RankError(
            f"{differing('parameters', ranks, layouts)} (a checksum of shapes, dtypes, "
            "requires_grad and order). Give the optimizer the same parameters in the same order on "
            "every rank: a set has no order. If each rank holds parameters of its own (a pipeline, "
            "hand-made shards), say so with sharded=True"
        )
    if any(row.checked for row in rows) and not any(row.scaled for row in rows):
        raise MisuseError(f"on ranks {listed(ranks)} {nothing_scaled(group.call)}")
    group.compared = True


def nothing_scaled(call: str) -> str:
    return (
        f"no loss was scaled since the last update(), so {call} would divide gradients by a scale "
        "that they do not carry; nothing was changed. Call scaler.scale(loss).backward(), with the "
        "key= of this call if it has one, or get_scale() in each window if you scale by hand. A "
        "rank that has no loss of its own (a pipeline's first stage) needs process_group="
    )


def differing(what: str, ranks: Iterable[int], values: Iterable[Any]) -> str:
    """
    >>> differing("scales", [0, 1, 2], [4.0, 8.0, 4.0])
    'scales differ: ranks 0, 2 have 4.0, rank 1 has 8.0'
    """
    by_value: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values):
        by_value.setdefault(value, []).append(rank)
    said = [
        f"rank{'s' * (len(those) > 1)} {listed(those)} {'have' if len(those) > 1 else 'has'} {v}"
        for v, those in by_value.items()
    ]
    return f"{what} differ: {', '.join(said)}"


_WHAT_TO_DO = (
    "From here on they would scale, skip and step differently. Load the same scaler state on every "
    "rank (save it on one, load it on all), and pass process_group= so that they decide together"
)


def _facts(scaler: DropIn) -> dict[str, Any]:
    """What must be equal, by name, the most telling first."""
    if not scaler.active:
        return {"switches": "off"}
    facts: dict[str, Any] = {"switches": "on"}
    scales = {"" if key is None else f" of {key!r}": s for key, s in scaler._scales.items()}
    states = {of: scales[of].numbers() for of in sorted(scales)}
    for of, state in states.items():
        facts[f"scales{of}"] = float(state.scale)
    facts["rules"] = re.sub(r"(?<=[:,])init_scale=[^,]*,?", "", str(scaler.rule))  # history by now
    for of, state in states.items():
        counters = {name: int(n) for name, n in state._asdict().items() if name != "scale"}
        facts.update({f"counters {name!r}{of}": n for name, n in counters.items()})
        facts[f"steps{of}"] = scales[of].steps
        facts[f"skipped steps{of}"] = scales[of].home.skipped
    return facts


def assert_in_sync(scaler: DropIn, group: Any) -> None:
    if not distributed():
        return
    group = group if group is not None else resolved(scaler._settings.group) or dist.group.WORLD
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return
    everyone: list[Any] = [None] * len(ranks)
    with in_words(ranks, "assert_in_sync()"):
        dist.all_gather_object(everyone, _facts(scaler), group=group)
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name, "none") for facts in everyone]
        if len({*values}) > 1:
            raise RankError(f"{differing(name, ranks, values)}. {_WHAT_TO_DO}")

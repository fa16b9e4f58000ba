"""One small collective a step, so that every rank takes the same decision.

Each rank says twelve numbers; they are gathered, and combined by each rank for itself: a MAX over
the network may lose a NaN, and a gather shows who said what.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MisuseError, RankError
from ..reading import NAN
from ._circle import Circle, listed
from ._shards import distributed

NOT_TAKEN = -1.0
NORM, AMAX, CLIPS = 1, 2, 4  # bits of what a rank asks for


def alone() -> bool:
    """Is this process the whole job? Only then may it trust its own loss without asking."""
    return world_size(None) == 1


def world_size(group: Any) -> int:
    """How many ranks there are, in a group or in all."""
    return dist.get_world_size(group) if distributed() else 1


class Said(NamedTuple):
    """What one rank says of its part; numbers, or 0-d tensors on a device."""

    nonfinite: Any
    dead: Any
    """0 if all its losses were finite, 2 if none was, else 1."""
    known: Any
    """Has it scaled a loss at all? The first stage of a pipeline has not."""
    checked: Any
    amax: Any = NOT_TAKEN
    probe: Any = NOT_TAKEN
    own: Any = NOT_TAKEN
    """Norm of what only some ranks hold, weighted so that the squares of all ranks add up."""
    shared: Any = NOT_TAKEN
    """Norm of what every rank holds."""
    culprit: Any = 0
    """Twice the position of the first non-finite parameter, plus 1 for inf or 2 for NaN."""
    asks: Any = 0
    scale: Any = 1.0
    layout: Any = 0


class Heard(NamedTuple):
    """What all ranks said together."""

    nonfinite: Any
    dead: Any
    known: Any
    checked: Any
    amax: Any
    probe: Any
    norm: Any
    culprit: Any
    """As said, by the rank whose parameter backward reached first."""


@contextlib.contextmanager
def in_words(ranks: Iterable[int]) -> Iterator[None]:
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
            f"ranks {listed(ranks)} could not agree; the collective failed after "
            f"{time.monotonic() - began:.1f} s: {error!s:.300}. One of them has died, hangs, or "
            "did not come to the same call: the log of the rank that ended first says why. Nothing "
            "was stepped here. Restart from the last checkpoint; how long ranks wait is "
            "init_process_group(timeout=...)"
        ) from error


def gather(packed: Tensor, circle: Circle) -> Tensor:
    """One row a rank, in the order of the group."""
    table = packed.new_empty(circle.size, packed.numel())
    with in_words(circle.ranks):
        dist.all_gather(list(table.unbind(0)), packed, group=circle.group)
    return table


def agree(mine: Said, circle: Circle) -> Heard:
    """In numbers, on the CPU."""
    packed = torch.tensor([NOT_TAKEN if x != x else float(x) for x in mine], dtype=torch.float64)
    rows = [Said(*row) for row in gather(packed, circle).tolist()]
    compare(rows, circle)
    top = Said(*map(max, zip(*rows)))
    return Heard(
        top.nonfinite > 0,
        top.dead > 1 or (top.dead > 0 and top.nonfinite > 0),
        top.known > 0,
        top.checked > 0,
        math.inf if top.amax < 0 else top.amax,
        NAN if top.probe < 0 else top.probe,
        math.nan if top.nonfinite else _norm([r.own for r in rows], top.shared),
        int(top.culprit),
    )


def _norm(own: list[float], shared: float) -> float:
    if min(own) < 0 or shared < 0:
        return math.nan
    return math.hypot(shared, *own) if any(own) else shared


def agree_on_device(mine: Said, circle: Circle, device: torch.device) -> Heard:
    """The same in tensors: nothing waits, but for the first time after a scale was set by hand.
    Should scales differ nevertheless, nobody steps."""
    table = gather(packed(mine, device), circle)
    if not circle.compared:
        compare([Said(*row) for row in table.tolist()], circle)
    top = Said(*table.amax(0))
    own = torch.cat([table[:, Said._fields.index("own")], top.shared.reshape(1)])
    most = own.amax().clamp(min=torch.finfo(torch.float32).tiny)
    norm = torch.linalg.vector_norm(own / most) * most  # a square might leave float32
    apart = table[:, Said._fields.index("scale")].amin() != top.scale
    return Heard(
        (top.nonfinite > 0).logical_or(apart),
        top.dead + top.nonfinite > 1.5,
        top.known > 0,
        top.checked > 0,
        torch.where(top.amax < 0, math.inf, top.amax),
        torch.where(top.probe < 0, NAN, top.probe),
        torch.where(own.amin() < 0, math.nan, norm),
        top.culprit,
    )


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


def agreed_norm(own: float, shared: float, circle: Circle) -> float:
    """The norm alone, for gradients that were unscaled before somebody asked for it."""
    table = gather(torch.tensor([own, shared], dtype=torch.float64), circle).tolist()
    return _norm([row[0] for row in table], max(row[1] for row in table))


def compare(rows: list[Said], circle: Circle) -> None:
    """All ranks see the same rows, so if they differ all raise the same error at the same time."""
    asks = 0
    for row in rows:
        asks |= int(row.asks)
    if circle.has_own:  # else what the asking rank has is what all have
        circle.asked_norm, circle.asked_amax = bool(asks & NORM), bool(asks & AMAX)
    if len({row.scale for row in rows}) > 1:
        raise RankError(
            f"{differing('scales', circle.ranks, [row.scale for row in rows])}. Their gradients "
            "cannot be added up. Load the same scaler state on every rank, set scales by hand on "
            "all or none, compute losses in float32 (a float16 loss caps the scale of the rank "
            "that scales it), and if optimizers lie on different meshes, or some of them on none, "
            "pass process_group= with all ranks"
        )
    clips = ["clipping" if int(row.asks) & CLIPS else "no clipping" for row in rows]
    if len({*clips}) > 1:
        raise RankError(
            f"{differing('calls', circle.ranks, clips)}. Their weights would part. Call "
            "clip_grad_norm_(), or step() with max_norm=, on every rank or on none"
        )
    layouts = [int(row.layout) for row in rows]
    if len({*layouts} - {0}) > 1:
        raise RankError(
            f"{differing('parameters', circle.ranks, layouts)} (a checksum of shapes, dtypes, "
            "requires_grad and order). Give the optimizer the same parameters in the same order on "
            "every rank: a set has no order. If each rank holds parameters of its own (a pipeline, "
            "hand-made shards), say so with sharded=True"
        )
    circle.compared = True


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

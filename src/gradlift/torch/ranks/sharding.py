"""What this rank holds of a parameter: all of it, or a part, as far as the parameter itself shows.

A DTensor says so by its mesh and placements. FSDP1 leaves a mark on what it has flattened, and the
object that knows the rest somewhere in memory. A plain tensor says nothing: see `sharded=`.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ...errors import MisuseError

_FLATTENED = "_fsdp_flattened"


class Held(NamedTuple):
    """How a parameter is spread over ranks."""

    parts: int = 1
    """Into how many parts it is cut, of which this rank holds one; 0 if unknown."""
    copies: int = 1
    """How many ranks of its own mesh hold this same part."""
    ranks: frozenset[int] = frozenset()
    """Those that hold all its parts, once each; empty if it is whole."""
    home: frozenset[int] = frozenset()
    """All ranks of its mesh or group; empty for a plain tensor."""
    where: Any = None
    """That mesh or group."""


WHOLE = Held()


def is_dtensor(t: Any) -> bool:
    """Looked up, not imported: DTensor takes as long to import as half of torch, and who has one
    has imported it.

    >>> import torch
    >>> is_dtensor(torch.ones(2))
    False
    """
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(t, home.DTensor)


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, where it lies; any other tensor as it is.

    >>> import torch
    >>> t = torch.ones(2)
    >>> local(t) is t
    True
    """
    return t._local_tensor if is_dtensor(t) else t  # type: ignore[attr-defined]


def brought_home(p: Tensor, g: Any) -> Any:
    """A DTensor gradient laid out as its parameter is, so that its parts can be looked at.

    A gradient that is still a sum to be done (`Partial`: a norm layer under sequence parallelism)
    is added up over its mesh, which the optimizer would do otherwise, at every operation.
    """
    placements = getattr(p, "placements", g.placements)
    if g.placements != placements:
        p.grad = g = g.redistribute(placements=placements)
    part = g._local_tensor
    if 0 in part.stride() and part.numel() > 1:  # many elements, one place: cannot be written
        p.grad = g = g.clone()
    return g


def is_flattened(p: Tensor) -> bool:
    """Does FSDP1 own it?"""
    return getattr(p, _FLATTENED, False)


def held(params: list[Any]) -> list[Held]:
    """For each parameter, how it is spread."""
    known: dict[Any, Held] = {}
    handles: dict[int, Any] | None = None
    found = []
    for p in params:
        if is_dtensor(p):
            key = (p.device_mesh, p.placements)
            if key not in known:
                known[key] = _of_mesh(*key)
            found.append(known[key])
        elif is_flattened(p):
            handles = _handles() if handles is None else handles
            found.append(_of_handle(handles.get(id(p))))
        else:
            found.append(WHOLE)
    return found


def _of_mesh(mesh: Any, placements: tuple[Any, ...]) -> Held:
    if any(placement.is_partial() for placement in placements):
        raise MisuseError(
            f"a parameter is a DTensor with placements {placements}: a sum that was never done. "
            "Make parameters with Shard or Replicate placements"
        )
    # _StridedShard (tensor parallel inside FSDP2) does not call itself a shard.
    cut = [not placement.is_replicate() for placement in placements]
    sizes = [mesh.size(d) for d in range(mesh.ndim)]
    parts = math.prod(n for n, is_cut in zip(sizes, cut) if is_cut)
    here = mesh.get_coordinate()
    home = frozenset(mesh.mesh.flatten().tolist())
    if here is None:  # this rank is not in the mesh and holds nothing
        return Held(parts, 1, frozenset(), home, mesh)
    across = mesh.mesh[tuple(slice(None) if is_cut else at for is_cut, at in zip(cut, here))]
    ranks = frozenset(across.flatten().tolist()) if parts > 1 else frozenset()
    return Held(parts, math.prod(sizes) // parts, ranks, home, mesh)


def _handles() -> dict[int, Any]:
    """id(parameter) -> what FSDP1 knows of it. Walks every object once, so it is called once."""
    handles: dict[int, Any] = {}
    for h in gc.get_objects():
        if type(h).__name__ == "FlatParamHandle" and hasattr(h, "flat_param"):
            own = [h.flat_param, *(getattr(h.flat_param, "_params", None) or [])]
            handles.update({id(p): h for p in own})
    return handles


def _of_handle(handle: Any) -> Held:
    if handle is None:
        return Held(parts=0)
    group = handle.process_group
    ranks = frozenset(dist.get_process_group_ranks(group))
    if handle.uses_sharded_strategy:
        return Held(len(ranks), 1, ranks, ranks, group)
    return Held(1, len(ranks), frozenset(), ranks, group)


def value_of(loss: Tensor) -> Tensor:
    """A loss as a plain tensor; one that is spread over ranks is put together."""
    if not is_dtensor(loss):
        return loss
    spread: Any = loss.detach()
    return spread.full_tensor()


distributed: Callable[[], bool] = getattr(dist, "is_initialized", bool)  # bool(): False
"""Are there process groups at all? Without them no tensor is spread."""

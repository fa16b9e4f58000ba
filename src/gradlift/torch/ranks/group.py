"""The process group that agrees on one optimizer's step, and each parameter's weight in the
global norm."""

from __future__ import annotations

import gc
import weakref
import zlib
from bisect import bisect, insort
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MisuseError, RankError, SettingsError
from ..names import outermost
from .sharding import Held, distributed, held, is_flattened

Sharded = bool | Callable[[Tensor], bool | None]
SAME = -1.0
"""The weight of a parameter that is the same on every rank: the largest norm counts, once."""

EVERYONE = object()
"""The default group, whichever it is when it is needed: it may be destroyed and made again."""
_LAYOUTS = 2**24 - 1  # a float32 holds whole numbers up to here
_made: weakref.WeakKeyDictionary[Any, dict[frozenset[int], Any]] = weakref.WeakKeyDictionary()


class RankGroup:
    """The ranks that agree on the steps of one optimizer.

    `group` is None if none are asked: there is one process, or no group was named.
    """

    group: Any = None
    size = 1
    ranks: tuple[int, ...] = (0,)
    sees_all_losses = True
    """Is it all ranks? Else others may have averaged a non-finite loss into its gradients."""
    same_parameters = True
    """Do all ranks hold the same list of parameters, whole or in parts?"""
    has_shards = False
    """May any rank count something that others do not hold? The same answer on all of them."""
    weights: dict[int, float]
    """id(parameter) -> what its squares count, on each rank of the group."""
    common_weight: float | None = SAME
    """The weight of every parameter, None if they differ."""
    asked_norm = asked_amax = False
    """Has some rank asked for these, say for its journal?"""
    call = "step()"
    """In which call of the user they agree."""
    scales = False
    """Had this rank scaled a loss when they agreed last?"""
    shows_norm = False
    """Would it also have done so without a recorded run around?"""
    compared = False
    """Have scales and layouts been compared since the scale was last set by hand?"""

    def __init__(self, params: list[Tensor], given: Any, sharded: Sharded) -> None:
        self.params, self.given = params, given
        self.world = weakref.ref(dist.group.WORLD) if distributed() else None
        self.tensors: dict[Any, Tensor] = {}  # constants that were sent to a device
        self._position: dict[int, int] | None = None
        if not distributed():
            if given is not None:
                raise RankError(
                    "the process group of this scaler was destroyed: make a new one with "
                    "torch.distributed.init_process_group()"
                )
            return
        spread = held(params)
        group, closed = (resolved(given), False) if given is not None else _own_group(spread)
        world = dist.get_world_size()
        if group is None:
            self.sees_all_losses = world == 1
            if world > 1 and sharded is not False:
                raise MisuseError(
                    "sharded= says which parameters only this rank holds, but no other rank is "
                    "asked for the others: pass process_group= as well"
                )
            return
        self.ranks = tuple(ranks_of(group))
        self.size = len(self.ranks)
        self.sees_all_losses = self.size == world
        weights = [self._weight(p, h, sharded) for p, h in zip(params, spread)]
        if self.size == 1:
            return
        self.group = group
        self.weights = {id(p): w for p, w in zip(params, weights)}
        several = dict.fromkeys(weights)
        self.common_weight = weights[0] if len(several) == 1 else None
        self.has_shards = sharded is not False or any(w != SAME for w in several)
        self.same_parameters = sharded is False and not closed

    @cached_property
    def layout(self) -> int:
        """A checksum of the list of parameters; 0 if ranks may differ."""
        return (
            layout(self.params)
            if self.same_parameters and not any(map(is_flattened, self.params))
            else 0
        )

    @cached_property
    def _ddp(self) -> list[Any]:
        """The DDP modules that hold its parameters, as weak references."""
        kind = torch.nn.parallel.DistributedDataParallel
        mine = {id(p) for p in self.params}
        found = [m for m in gc.get_objects() if issubclass(type(m), kind)]
        return [weakref.ref(m) for m in found if mine & {id(p) for p in m.parameters()}]

    def refuse_join(self) -> None:
        """DDP's own `join()` stands in for DDP's collectives only: a rank that leaves would be
        waited for, until the timeout."""
        if any(m is not None and m._join_config.enable for m in (ref() for ref in self._ddp)):
            raise MisuseError(
                "a rank that leaves model.join() cannot take part in the scaler's decision, and "
                "the others would wait for it: write `with scaler.join(model):`"
            )

    def fits(self, params: list[Tensor], given: Any) -> bool:
        """Is this still the group of these parameters? Groups may have been made anew."""
        now = dist.group.WORLD if distributed() else None
        return (
            (None if self.world is None else self.world()) is now
            and given is self.given
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
        )

    def weights_of(self, params: Iterable[Tensor]) -> list[float]:
        """What each of these counts."""
        if self.common_weight is not None:
            return [self.common_weight for _ in params]
        return [self.weights[id(p)] for p in params]

    def position(self, p: Tensor) -> int:
        if self._position is None:
            self._position = {id(p): i for i, p in enumerate(self.params)}
        return self._position[id(p)]

    def _weight(self, p: Tensor, how: Held, sharded: Sharded) -> float:
        said = sharded(p) if callable(sharded) else sharded
        if said is None:
            return 0.0
        if said is not True and said is not False:
            raise SettingsError(
                f"sharded(parameter) returned {said!r}, expected True (only this rank holds it), "
                "False (every rank does) or None (another rank counts it)"
            )
        if not how.ranks <= {*self.ranks}:
            raise MisuseError(
                f"parameters are cut into parts that lie on ranks {listed(how.ranks)}, but "
                f"process_group= has ranks {listed(self.ranks)}: their norm could not be computed. "
                "Pass a group with all of them, or none: DTensors know their own mesh"
            )
        if said:
            return 1.0 / how.copies
        if how.parts == 1:
            return SAME
        if how.parts == 0:  # FSDP1: no more is known
            return 1.0
        if self.size % how.parts:
            raise MisuseError(
                f"parameters are cut into {how.parts} parts, but the {self.size} ranks of "
                "process_group= cannot each hold one: pass another group, or sharded=True if each "
                "rank has parameters of its own"
            )
        return how.parts / self.size


ALONE = RankGroup.__new__(RankGroup)  # one process, and no weights


def resolved(given: Any) -> Any:
    return dist.group.WORLD if given is EVERYONE else given


def remembered(group: Any) -> Any:
    """A group as a scaler keeps it."""
    if group is not None and distributed() and group is dist.group.WORLD:
        return EVERYONE
    return group


def ranks_of(group: Any) -> list[int]:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise MisuseError(
            "this rank is not in process_group=: make a scaler only on the ranks of its group, or "
            "give each rank a group that it belongs to"
        )
    if hasattr(group, "get_group"):
        raise SettingsError(
            "the process group is a DeviceMesh, expected a ProcessGroup: pass mesh.get_group(), or "
            "leave it out, as DTensors know their own mesh"
        )
    try:
        return dist.get_process_group_ranks(group)
    except KeyError as error:
        raise RankError(
            "the process group of this scaler was destroyed: set scaler.process_group to the one "
            "that took its place"
        ) from error


def _own_group(spread: list[Held]) -> tuple[Any, bool]:
    """The smallest group that holds all parts of all parameters, if they tell; and whether it had
    to be closed over meshes that cross each other, so that ranks may hold different parameters."""
    me = dist.get_rank()
    homes = {h.home: h.where for h in spread if me in h.home}
    if not homes:
        return None, False
    largest = max(homes, key=len)
    if all(home <= largest for home in homes):
        return _group_of(homes[largest], largest), False
    roots = {root for where in homes.values() if (root := _root(where)) is not None}
    if len(roots) != 1 or any(_root(where) is None for where in homes.values()):
        raise MisuseError(
            f"parameters lie on {len(homes)} meshes that have nothing in common "
            f"({'; '.join(listed(home) for home in homes)}): pass process_group= with all ranks "
            "that decide together"
        )
    (root,) = roots
    return _group_of(root, frozenset(root.mesh.flatten().tolist())), True


def _root(where: Any) -> Any:
    find = getattr(where, "_get_root_mesh", None)
    return find() if find is not None else None


def _group_of(where: Any, ranks: frozenset[int]) -> Any:
    """One group of a mesh's ranks; of several dimensions, made once, by all of them at once."""
    if not hasattr(where, "mesh"):  # FSDP1's own group
        return where
    if where.ndim == 1:
        return where.get_group()
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    groups = _made.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return groups[ranks]


def layout(params: list[Tensor]) -> int:
    """A checksum of shapes, dtypes, requires_grad and order, from 1 to 2^24 - 1.

    Order is distinguished even between equal shapes, by how it differs from that in the modules.
    Neither names nor places are used: they depend on what else holds a module, on this rank.

    >>> import torch
    >>> a, b = torch.nn.Linear(2, 2).parameters()
    >>> layout([a, b]) == layout([a, b]), layout([a, b]) == layout([b, a])
    (True, False)
    """
    each = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]
    facts = each, _overtaken(params)
    return zlib.crc32(repr(facts).encode()) % _LAYOUTS + 1


def _overtaken(params: list[Tensor]) -> list[int]:
    """For each parameter, how many that a module has before it come after it here; 0 if no module
    has it. Of several that have it the one with most of these counts: a view of some layers, on
    this rank, shows less."""
    at = {id(p): i for i, p in enumerate(params)}
    found: dict[int, tuple[int, int]] = {}
    for module in outermost():
        own = [at[id(p)] for p in module.parameters() if id(p) in at]
        passed: list[int] = []
        for i in own:
            n = -len(own), len(passed) - bisect(passed, i)
            found[i] = min(n, found.get(i, n))
            insort(passed, i)
    return [found.get(i, (0, 0))[1] for i in range(len(params))]


def listed(ranks: Iterable[int]) -> str:
    """
    >>> listed([0, 1, 2, 3, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)

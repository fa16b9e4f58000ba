"""State of a `MasterWeights` by parameter: as a mapping, and checked before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core.state import is_schema
from ...errors import StateError
from ...text import shown
from ..names import name_of
from .flat_region import COUNTERS
from .rounding import BITS16

if TYPE_CHECKING:
    from .master_weights import MasterWeights

SCHEMA = 1


class StateByParameter(MutableMapping[Any, dict[str, Any]]):
    """State by parameter, read out of the flat tensors when asked.

    Its tensors are views, except for the step counter, of which there is one for many parameters.
    """

    def __init__(self, owner: MasterWeights) -> None:
        self.owner = owner

    def __getitem__(self, p: Any) -> dict[str, Any]:
        states = self.owner._inner.state
        if not isinstance(p, Tensor):
            return states[p]
        if p not in self.owner._home:
            return dict(states.get(p, {}))
        region, i = self.owner._home[p]
        entry = region.read_state(i, states)
        if region.piece_of(i).begun:
            entry.update(region.extra(i))
        return entry

    def __setitem__(self, p: Any, entry: dict[str, Any]) -> None:
        if not isinstance(p, Tensor):
            self.owner._inner.state[p] = entry
            return
        old = self[p]
        if {*entry} != {*old} or not all(_same(entry[k], old[k]) for k in old):
            self.owner._put({q: entry if q is p else self[q] for q in self.owner._all()})

    def __delitem__(self, p: Any) -> None:
        self[p] = {}

    def clear(self) -> None:
        self.owner._put({})

    def __contains__(self, p: Any) -> bool:
        return bool(self[p]) if isinstance(p, Tensor) else p in self.owner._inner.state

    def __iter__(self) -> Iterator[Any]:
        yield from (k for k in self.owner._inner.state if not isinstance(k, Tensor))
        yield from (p for p in self.owner._all() if self[p])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr() or (a.shape == b.shape == () and bool(a == b))
    return bool(a == b)


def shadow(owner: MasterWeights) -> Optimizer:
    """The plain optimizer, over float32 stand-ins: torch itself reads a state into it."""
    plain = object.__new__(type(owner._inner))
    groups = [{**g, "params": [_stand_in(p) for p in g["params"]]} for g in owner.param_groups]
    Optimizer.__init__(plain, groups, dict(owner.defaults))
    return plain


def _stand_in(p: Tensor) -> Tensor:
    dtype = torch.float32 if p.dtype in BITS16 else p.dtype
    return torch.zeros((), dtype=dtype, device=p.device).expand(p.shape)


def nonfinite(entry: Any) -> str:
    """Where a parameter's state first has inf or NaN: "'exp_avg' is nan at [0, 3]"; "" if nowhere.

    >>> nonfinite({"exp_avg": torch.tensor([1.0, float("nan")])})
    "'exp_avg' is nan at [1]"
    """
    for key, value in entry.items() if isinstance(entry, dict) else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            found = first_nonfinite(value)
            if found:
                return f"{key!r} is {found}"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{key!r} is {value}"
    return ""


def first_nonfinite(value: Tensor) -> str:
    """
    >>> first_nonfinite(torch.tensor([[1.0], [float("inf")]]))
    'inf at [1, 0]'
    """
    finite = value.isfinite()
    if finite.all():
        return ""
    at = (~finite).nonzero()[0].tolist()
    return f"{value[tuple(at)].item()} at {at}"


def check_groups(groups: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Are these settings of this optimizer? A NaN among them would be in every weight."""
    for i, (group, current) in enumerate(zip(groups, now)):
        for name, value in group.items():
            if name not in ("params", "param_names") and not _fits(value, current.get(name)):
                raise StateError(
                    f"{name} of parameter group {i} is {shown(value)}: this state is damaged, or "
                    "belongs to another optimizer"
                )


def _fits(value: Any, current: Any) -> bool:
    """Can a setting that is `current` be `value`? Numbers must be finite."""
    if isinstance(current, (tuple, list)):
        alike = isinstance(value, (tuple, list)) and len(value) == len(current)
        return alike and all(map(_fits, value, current))
    if isinstance(current, str) or callable(current):
        return isinstance(value, type(current))
    if isinstance(current, (float, Tensor)) or type(current) is int:
        return abs(_number(value)) < 2.0**127  # False for NaN
    if value is None or type(value) is bool:
        return True
    return current is None and (isinstance(value, str) or _fits(value, 0.0))


def _number(value: Any) -> float:
    """A number, or the only one in an array; NaN for anything else."""
    if hasattr(value, "item") and math.prod(value.shape) == 1:
        value = value.item()
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if real else math.nan


def check(owner: MasterWeights, entries: dict[Tensor, Any], extras: dict[Tensor, Any]) -> None:
    """Is this what the optimizer would have saved of these parameters?"""
    for p in owner._all():
        bad = nonfinite(entries[p]) or nonfinite(extras[p])
        if bad:
            raise StateError(
                f"the state {bad} of {name_of(p)}: it would be in the weights after one step. "
                "Load an earlier checkpoint, or load this one with strict=False: parameters with "
                "such a state then begin anew from the model's weights"
            )
    for p in owner._all():
        for entry in (entries[p], extras[p]):
            if not isinstance(entry, dict):
                raise StateError(f"the state of {name_of(p)} is {shown(entry)}, expected a dict")
            for key, value in entry.items():
                if key == "master" or (owner._elementwise and isinstance(key, str)):
                    _check_value(p, key, value)
    if owner._elementwise:
        for group in owner.param_groups:
            kinds = {p: frozenset(entries[p]) - {"master"} for p in group["params"] if entries[p]}
            if len({*kinds.values()} - {frozenset()}) > 1:
                odd = min(kinds, key=lambda p: len(kinds[p]))
                raise StateError(
                    f"the state of {name_of(odd)} has only {sorted(kinds[odd])}, that of other "
                    "parameters has more"
                )


def _check_value(p: Tensor, key: str, value: Any) -> None:
    one = 0 <= _number(value) < 2**63
    each = isinstance(value, Tensor) and value.shape == p.shape
    if (one if key in COUNTERS else each) or (key == "momentum_buffer" and value is None):
        return
    shape = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{shown(value)}"
    wanted = "one number" if key in COUNTERS else f"the shape {tuple(p.shape)}"
    raise StateError(
        f"the state {shown(key)} of {name_of(p)} has {shape}, expected {wanted}: it is damaged or "
        "belongs to another model"
    )


def own_part(own: Any) -> tuple[dict[str, int], dict[int, dict[str, Tensor]], list[int]]:
    """What a state dict has under "gradlift": the noise's seed and step, the masters of parameters
    without an entry, the parameters that pieces begin with. StateError if it is damaged."""
    if not isinstance(own, dict) or not is_schema(own.get("schema", SCHEMA)):
        raise StateError(f"this state's 'gradlift' entry has an unknown schema: {shown(own)}")
    seed, apart, leads = own.get("noise", {}), own.get("apart", {}), own.get("leads", [])
    numbers = isinstance(seed, dict) and all(
        type(n) is int and 0 <= n < 2**63 for n in seed.values()
    )
    if not numbers or not {*seed} <= {"seed", "step"}:
        raise StateError(f"this state's noise is {shown(seed)}, expected a seed and a step")
    if not isinstance(apart, dict) or not all(isinstance(e, dict) for e in apart.values()):
        raise StateError("this state's masters are damaged")
    if not isinstance(leads, list) or not all(type(i) is int and i >= 0 for i in leads):
        raise StateError("this state's pieces are damaged")
    return seed, apart, leads

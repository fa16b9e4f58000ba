"""Parameters by name, for errors, culprits and the journal."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Culprit
from .scaler.finite_check import Inspection, kind_of

if TYPE_CHECKING:
    from .ranks.group import RankGroup

Names = torch.nn.Module | Mapping[str, Tensor] | None


def named(source: Names) -> dict[int, str]:
    """id(parameter) -> name, from a model or a mapping."""
    if source is None:
        return {}
    if isinstance(source, torch.nn.Module):
        return {id(p): name for name, p in source.named_parameters()}
    return {id(p): name for name, p in source.items()}


def found() -> dict[int, str]:
    """id(parameter) -> dotted path from the outermost module that owns it, of all living modules.

    Walks every object once, so it is called only when something went wrong.
    """
    names: dict[int, str] = {}
    for module in outermost():
        for name, p in module.named_parameters():
            names.setdefault(id(p), name)
    return names


def outermost() -> list[torch.nn.Module]:
    """All living modules that are no other's child."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    modules = [m for m in modules if "_modules" in vars(m)]  # else its constructor has failed
    inner = {id(child) for m in modules for child in m.children()}
    return [m for m in modules if id(m) not in inner]


def name_of(p: Tensor, names: Mapping[int, str] | None = None) -> str:
    """The parameter's name, or its shape if no module owns it."""
    name = (names or {}).get(id(p)) or found().get(id(p))
    return name or f"a parameter of shape {tuple(p.shape)}"


def name_apart(params: list[Tensor], names: dict[int, str], taken: dict[str, int]) -> None:
    """Puts a name for each parameter into `names`; those of two models with equal names differ.

    `taken` remembers which parameter has which name.
    """
    if not all(id(p) in names for p in params):
        names.update({**found(), **names})
    for i, p in enumerate(params):
        name = names.get(id(p), f"parameter {i} of shape {tuple(p.shape)}")
        again, n = name, 1
        while taken.setdefault(again, id(p)) != id(p):
            n += 1
            again = f"{name} [{n}]"
        names[id(p)] = again


def culprits(
    params: list[Tensor], names: dict[int, str], grads: list[Tensor] | None = None
) -> tuple[Culprit, ...]:
    """The parameters with non-finite gradients, in reverse order: backward reached them first.
    `grads`: one for each parameter, where `.grad` shows them less well."""
    shown = [p.grad for p in params] if grads is None else grads
    bad = [(p, kind_of(g)) for p, g in zip(params, shown) if g is not None]
    return _label([(p, kind) for p, kind in bad if kind], names)


def nonfinite_weights(weights: list[Tensor], params: list[Tensor], names: dict[int, str]) -> Any:
    """Parameters whose weights are not finite, in order; only looked at when a step went wrong."""
    kinds = [kind_of(w.detach()) for w in weights]
    bad = [(p, kind) for p, kind in zip(params, kinds) if kind]
    return _label(bad, names)[::-1]


def culprits_by_peak(
    params: list[Tensor], look: Inspection, names: dict[int, str]
) -> tuple[Culprit, ...]:
    """The same from per-tensor peaks that were taken on a device."""
    bad = []
    for i, peak in sorted(zip(look.order, look.peaks.tolist(), strict=True)):
        if not math.isfinite(peak):
            bad.append((params[i], "nan" if math.isnan(peak) else "inf"))
    return _label(bad, names)


def with_first(
    mine: tuple[Culprit, ...], first: int, group: RankGroup, names: dict[int, str]
) -> tuple[Culprit, ...]:
    """This rank's culprits, and in front the first one of any rank, if it is not among them.

    `first` is twice its position, plus 1 for inf or 2 for NaN; 0 if there is none.
    """
    if not first or (mine and not group.same_parameters):
        return mine
    position, kind = (first - 1) // 2, "inf" if first % 2 else "nan"
    if not group.same_parameters:
        return (Culprit("a parameter on another rank", kind),)
    named = _label([(group.params[position], kind)], names)
    return mine if named[0] in mine else named + mine


def _label(bad: list[tuple[Tensor, str]], names: dict[int, str]) -> tuple[Culprit, ...]:
    """Names what is bad; what was not in `names` is looked for once and remembered there."""
    unknown = [p for p, _ in bad if id(p) not in names]
    if unknown:
        living = found()
        for p in unknown:
            names[id(p)] = living.get(id(p), f"a parameter of shape {tuple(p.shape)}")
    return tuple(Culprit(names[id(p)], kind) for p, kind in reversed(bad))

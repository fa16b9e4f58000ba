"""Which modules are blocks, and which cannot be."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import MisuseError, SettingsError
from ._border import HALF_LEAF


def choose(model: nn.Module, blocks: Iterable[nn.Module | str] | None) -> dict[str, nn.Module]:
    """name -> module, in the model's order; refuses what cannot work."""
    names = {m: name for name, m in model.named_modules()}
    chosen = _default(model) if blocks is None else _asked_for(names, blocks)
    found = {name: m for m, name in names.items() if m in chosen}
    if not found:
        raise SettingsError("there is no block to lift: blocks is empty")
    for name, block in found.items():
        for m in block.modules():
            if m is not block and m in chosen:
                raise SettingsError(
                    f"block {names[m]!r} lies inside block {name!r}: name one of them"
                )
            if getattr(m.__dict__.get("forward"), "lifts", False):
                raise MisuseError(
                    f"{names[m]!r} is lifted already: call remove() of the first layerwise() first"
                )
        for p_name, p in block.named_parameters(prefix=name):
            if is_lazy(p):
                raise MisuseError(f"{p_name} has no shape yet: call the model once before")
            if p.dtype is torch.float16:
                raise MisuseError(HALF_LEAF.format(p_name))
    return found


def _default(model: nn.Module) -> set[nn.Module]:
    children = []
    for child in model.children():
        opened = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        children += list(child.children()) if opened else [child]
    return {c for c in children if any(True for _ in c.parameters())} or {model}


def _asked_for(names: dict[nn.Module, str], blocks: Iterable[nn.Module | str]) -> set[nn.Module]:
    if isinstance(blocks, (str, nn.Module)):
        raise SettingsError("blocks is a list of modules or names, this is a single one")
    chosen: set[nn.Module] = set()
    for block in blocks:
        if isinstance(block, str):
            some = {m for m, name in names.items() if _matches(name, block)}
        else:
            some = {m for m in names if m is block}
        if not some:
            what = repr(block) if isinstance(block, str) else f"a {type(block).__name__}"
            raise SettingsError(
                f"the model has no module {what}; it has "
                f"{', '.join(list(names.values())[1:8]) or 'none'}, ..."
            )
        chosen |= some
    return chosen


def _matches(name: str, pattern: str) -> bool:
    """A star stays between two dots: "layers.*" are the layers, not what is inside them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))

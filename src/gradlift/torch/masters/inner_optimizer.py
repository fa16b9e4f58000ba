"""The optimizer that a `MasterWeights` takes over, and what it must refuse."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import MisuseError, SettingsError
from ..names import name_of
from ..ranks.sharding import is_dtensor
from .rounding import BITS16


def made(optimizer: Any, params: Any, settings: dict[str, Any]) -> Optimizer:
    """An optimizer as given, or made of its class; fused where there are 16-bit weights."""
    if isinstance(optimizer, Optimizer):
        if params is not None or settings:
            raise SettingsError(
                "an optimizer that exists already has its parameters and settings: pass it alone, "
                "or pass its class"
            )
        return optimizer
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise SettingsError(f"expected an optimizer or its class, this is {optimizer!r:.80}")
    if params is None:
        raise SettingsError(f"MasterWeights({optimizer.__name__}, ...) needs parameters or groups")
    groups = [
        {**p, "params": p["params"] if isinstance(p["params"], Tensor) else list(p["params"])}
        if isinstance(p, dict)
        else p
        for p in params
    ]

    def of_class(**more: Any) -> Optimizer:
        fresh = [dict(g) if isinstance(g, dict) else g for g in groups]
        return optimizer(fresh, **settings, **more)

    plain = of_class()
    chosen = {"fused", "foreach", "differentiable"} & {*settings}
    narrow = any(p.dtype in BITS16 for g in plain.param_groups for p in g["params"])
    if narrow and not chosen and "fused" in inspect.signature(optimizer).parameters:
        with contextlib.suppress(RuntimeError):  # no fused kernel for these devices
            return of_class(fused=True)
    return plain


def in_float32(p: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """A 16-bit parameter's state as its master's."""
    if p.dtype not in BITS16:
        return dict(entry)
    return {
        k: v.float() if isinstance(v, Tensor) and v.dtype is p.dtype else v
        for k, v in entry.items()
    }


def refuse_references(kind: type[Optimizer], attributes: dict[str, Any], params: Any) -> None:
    """An optimizer that remembers parameters by itself would step those, not their masters."""
    ids = {id(p) for p in params}
    for name, value in attributes.items():
        if _holds(value, ids):
            raise SettingsError(
                f"{kind.__name__} keeps parameters in its attribute {name!r}, which MasterWeights "
                "cannot exchange for their masters: wrap the optimizer inside it instead"
            )


def _holds(value: Any, ids: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) in ids
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, dict):
        return any(_holds(v, ids) for v in (*value.keys(), *value.values()))
    return isinstance(value, (list, tuple, set)) and any(_holds(v, ids) for v in value)


def refuse(params: list[Tensor], update: str) -> None:
    """Parameters that cannot have masters, with the reason."""
    for p in params:
        if is_dtensor(p):
            raise MisuseError(
                f"{name_of(p)} is a DTensor: FSDP2 keeps float32 shards by itself. Leave the model "
                "in float32, use MixedPrecisionPolicy(param_dtype=...) and the optimizer without "
                "MasterWeights"
            )
        if p.is_complex():
            raise MisuseError(f"{name_of(p)} is complex: give it an optimizer of its own")
        if update != "masters" and p.dtype is torch.float16:
            raise SettingsError(
                f"{name_of(p)} is float16; update={update!r} is for bfloat16 weights, which have "
                "float32's exponents: use update='masters'"
            )
    addresses = Counter(p.data_ptr() for p in params if p.numel())
    twice = [p for p in params if addresses[p.data_ptr()] > 1]
    if twice:
        raise MisuseError(
            f"{name_of(twice[0])} shares its memory with another parameter of this optimizer: tie "
            "weights by using one Parameter in both places"
        )

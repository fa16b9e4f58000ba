"""`half_model`: a model in 16 bits, but for the layers that need float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import SettingsError
from ..nested import mapped

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_norm(module: nn.Module) -> bool:
    """Normalisation layers, torch's and those of others that are called so.

    >>> is_norm(nn.LayerNorm(4)), is_norm(nn.Linear(4, 4))
    (True, False)
    """
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    named = type(module).__name__.endswith("Norm") and not any(module.children())
    return isinstance(module, norms) or named


def half_model(
    model: nn.Module,
    dtype: torch.dtype = torch.float16,
    *,
    keep_fp32: Callable[[nn.Module], bool] = is_norm,
) -> nn.Module:
    """Converts a model to `dtype`, in place, and returns it.

    Layers for which `keep_fp32(layer)` holds stay in float32, with everything inside them, and so
    do layers that share a parameter with one: by default the normalisation layers. They get their
    inputs in float32 and pass `dtype` on. The model takes inputs of any float dtype, and its
    outputs are float32, so that the loss is computed in float32. Make the optimizer afterwards.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> model = half_model(model, keep_fp32=lambda m: isinstance(m, (nn.LayerNorm, nn.Embedding)))
    >>> [p.dtype for p in model[2].parameters()], model[0].weight.dtype
    ([torch.float16, torch.float16], torch.float32)
    >>> model(torch.tensor([[1, 2]])).dtype
    torch.float32
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise SettingsError(f"dtype is {dtype}, expected torch.float16 or torch.bfloat16")
    kept = _kept(model, keep_fp32)
    for module in model.modules():
        own = torch.float32 if id(module) in kept else dtype
        module._apply(lambda t, own=own: t.to(own) if t.dtype in _FLOATS else t, recurse=False)
    if id(model) in kept:
        return model
    _convert(model, inputs=dtype, outputs=torch.float32)
    for module in model.modules():
        if id(module) not in kept:
            for child in module.children():
                if id(child) in kept:
                    _convert(child, inputs=torch.float32, outputs=dtype)
    return model


def _kept(model: nn.Module, keep: Callable[[nn.Module], bool]) -> set[int]:
    """Those asked for, all inside them, and all that share a parameter with one of these."""
    kept = {id(inner) for m in model.modules() if keep(m) for inner in m.modules()}
    while True:
        params = {
            id(p) for m in model.modules() if id(m) in kept for p in m.parameters(recurse=False)
        }
        more = {
            id(m)
            for m in model.modules()
            if id(m) not in kept and any(id(p) in params for p in m.parameters(recurse=False))
        }
        if not more:
            return kept
        kept |= more


def _convert(module: nn.Module, *, inputs: torch.dtype, outputs: torch.dtype) -> None:
    module.register_forward_pre_hook(functools.partial(_before, inputs), with_kwargs=True)
    module.register_forward_hook(functools.partial(cast_output, outputs))


def _before(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast(args, dtype), cast(kwargs, dtype)


def cast_output(dtype: torch.dtype, module: nn.Module, args: Any, result: Any) -> Any:
    """A forward hook, with its first argument filled in: outputs in `dtype`."""
    return cast(result, dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """All float tensors in nested tuples, lists, dicts and dataclasses, in `dtype`."""
    return mapped(value, lambda t: t.to(dtype) if t.dtype in _FLOATS else t)

"""What `amp.initialize` does to models and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MisuseError
from ..torch import MasterWeights, half_model
from ..torch.masters.half_model import cast_output
from .casts import in_autocast, in_single
from .guard import Guard
from .opt_levels import Level
from .session import AMP

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_BITS16 = (torch.float16, torch.bfloat16)


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuses what apex refuses: wrapped models, and such as are in float16 already unless
    `_amp_state.allow_incoming_model_not_fp32`."""
    for model in models:
        if not isinstance(model, nn.Module):
            raise MisuseError(f"amp.initialize wants models, this is {type(model).__name__}")
        if isinstance(model, _WRAPPERS):
            raise MisuseError(
                f"this model is a {type(model).__name__}: wrap it after amp.initialize, not before"
            )
        for name, p in model.named_parameters():
            if p.dtype is torch.float16 and not AMP.allow_incoming_model_not_fp32:
                raise MisuseError(
                    f"{name} is float16 already: amp.initialize wants a float32 model, and wants "
                    "it once; every opt_level converts by itself"
                )


def check_optimizers(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise MisuseError(
                f"amp.initialize wants optimizers, this is {type(optimizer).__name__}"
            )


def is_batch_norm(module: nn.Module) -> bool:
    """What `keep_batchnorm_fp32` keeps: batch norms, and no other norm."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def prepared_models(
    models: Sequence[nn.Module], chosen: Level, outputs: torch.dtype | None
) -> None:
    """Converts and casts, in place."""
    for model in models:
        if chosen.half is not None:
            kept = is_batch_norm if chosen.keep_batchnorm_fp32 else lambda module: False
            half_model(model, chosen.half, keep_fp32=kept)
            for module in model.modules():
                module._register_state_dict_hook(_save_in_float32)
        elif chosen.patch_torch_functions:
            in_autocast(model, outputs or torch.float32)
        elif chosen.cast_model_type is torch.float32:
            model.register_forward_pre_hook(_inputs_in_single, with_kwargs=True)
        if outputs is not None and not chosen.patch_torch_functions:
            model.register_forward_hook(functools.partial(cast_output, outputs))


def _inputs_in_single(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return in_single((args, kwargs))


def _save_in_float32(
    module: nn.Module, saved: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Checkpoints are in float32 at every level, as apex's are."""
    for name in (*module._parameters, *module._buffers):
        value = saved.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in _BITS16:
            saved[prefix + name] = value.float()


def prepared_optimizers(
    optimizers: Sequence[Any], chosen: Level, *, convert: Callable[[], None]
) -> list[Any]:
    """Guards each; with masters, which begin as the weights that `convert` rounds."""
    params = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    masters = bool(chosen.master_weights)
    exact = [[p.detach().clone().float() for p in its] if masters else [] for its in params]
    convert()
    ready: list[Any] = []
    for optimizer, its, weights in zip(optimizers, params, exact):
        narrow = any(p.dtype in _BITS16 for p in its)
        if narrow and masters:
            over = MasterWeights(optimizer)
            over.refresh(weights)
            Guard(over, optimizer)
            ready.append(over)
            continue
        if narrow:
            for group in optimizer.param_groups:
                group.update({"fused": False} if "fused" in group else {})  # wrong on float16
        Guard(optimizer)
        ready.append(optimizer)
    return ready

"""Hooks on the calls that have no part in the numbers of a step, but in their order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..patches import Patches
from .calls import CallOrder


def install(patches: Patches, calls: CallOrder) -> None:
    """Notes zero_grad, schedules, load_state_dict, train, eval, autocast and autograd.grad."""
    note = functools.partial(_noted, patches, calls)
    note(torch.optim.Optimizer, "zero_grad", who=_itself)
    note(torch.nn.Module, "zero_grad", name="model.zero_grad")
    for kind in (LRScheduler, *_descendants(LRScheduler)):
        if "step" in vars(kind):
            note(kind, "step", name="scheduler.step", who=_scheduled, unless=_is_initial)
    for owner, name in (
        (torch.nn.Module, "model"),
        (torch.optim.Optimizer, "optimizer"),
        (torch.amp.GradScaler, "scaler"),
        (LRScheduler, "scheduler"),
    ):
        note(owner, "load_state_dict", name=f"{name}.load_state_dict")
    note(torch.nn.Module, "train", fact=_mode)
    note(torch.autocast, "__enter__", name="autocast", fact=_dtype)
    note(torch.amp.GradScaler, "get_scale")
    note(torch.autograd, "grad", name="autograd.grad", fact=functools.partial(_graph, calls))


def _noted(
    patches: Patches,
    calls: CallOrder,
    owner: Any,
    attribute: str,
    *,
    name: str = "",
    who: Callable[..., Any] | None = None,
    fact: Callable[..., str] | None = None,
    unless: Callable[..., bool] | None = None,
) -> None:
    original = vars(owner).get(attribute)
    if original is None:
        return
    name = name or attribute
    inside = False

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or torch.compiler.is_compiling() or not calls.listening():
            return original(*args, **kwargs)
        try:
            if name in ("zero_grad", "model.zero_grad"):
                calls.add_zero_grad(name, None if who is None else args[0])
            elif unless is None or not unless(*args):
                calls.add(
                    name,
                    None if who is None else who(*args),
                    "" if fact is None else fact(*args, **kwargs),
                )
        except Exception as error:
            calls.failed(error)
        inside = True
        try:
            return original(*args, **kwargs)
        finally:
            inside = False

    patches.attribute(owner, attribute, call)


def _itself(one: Any, *_: Any) -> Any:
    return one


def _scheduled(schedule: Any, *_: Any) -> Any:
    return getattr(schedule, "optimizer", schedule)


def _is_initial(schedule: Any, *_: Any) -> bool:
    """Does the schedule's constructor call it?"""
    return bool(getattr(schedule, "_is_initial", False))


def _mode(module: Any, mode: bool = True) -> str:
    return "" if mode else "eval"


def _dtype(context: Any) -> str:
    on = getattr(context, "_enabled", True)
    dtype = str(getattr(context, "fast_dtype", "")).removeprefix("torch.")
    return dtype if on else "off"


def _graph(calls: CallOrder, outputs: Any, *_: Any, create_graph: bool = False, **__: Any) -> str:
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    scaled = "scaled" if calls.is_scaled(listed) else ""
    return f"{scaled} create_graph".strip() if create_graph else scaled


def _descendants(kind: Any) -> list[type]:
    return [k for each in kind.__subclasses__() for k in (each, *_descendants(each))]

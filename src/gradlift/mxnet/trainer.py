"""What is read of a Gluon trainer, and which trainers are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mxnet.gluon import Trainer

from ..errors import MisuseError, SettingsError
from .finite_check import Gradient


def gradients(trainer: Any) -> tuple[list[Gradient], bool]:
    """The gradients that backward has written since the last step; are there others, stale ones?"""
    fresh, stale = [], False
    for param in trainer._params:
        if param.grad_req == "null":
            continue
        for data, grad in zip(param.list_data(), param.list_grad(), strict=True):
            if data._fresh_grad:
                fresh.append(Gradient(param.name, data, grad))
            else:
                stale = True
    return fresh, stale


def accumulated(trainer: Any) -> bool:
    """Is there a gradient that backward would add to?"""
    adding = [param for param in trainer._params if param.grad_req == "add"]
    return any(grad.asnumpy().any() for param in adding for grad in param.list_grad())


def forget(fresh: list[Gradient]) -> None:
    """Makes gradients stale: else those that backward does not reach would pass for the next
    step's."""
    for g in fresh:
        g.data._fresh_grad = False


def is_alone(trainer: Any) -> bool:
    """Does this process hold all gradients? If not, its loss is only a part of the loss."""
    store, reduce = trainer._kvstore, type(trainer)._allreduce_grads
    return (store is None or store.num_workers == 1) and reduce is Trainer._allreduce_grads


def keep_here(trainer: Any, *, must: bool) -> None:
    """Updates `must` happen in the trainer: a kvstore applies gradients before they are looked at.

    MXNet's own default with several devices is the kvstore; left open, it is the trainer now.
    """
    asked = trainer._kvstore_params
    store = asked["kvstore"]
    kind = store if isinstance(store, str) else getattr(store, "type", "")
    reason = (
        f"kvstore={kind!r} applies gradients as they arrive"
        if "async" in kind
        else "row_sparse weights live in the kvstore"
        if trainer._contains_sparse_weight
        else "compression_params compare scaled gradients with a fixed threshold"
        if trainer._compression_params
        else "update_on_kvstore=True applies gradients in the kvstore"
        if trainer._update_on_kvstore or asked["update_on_kvstore"]
        else ""
    )
    if reason and must:
        raise SettingsError(
            f"{reason}, before anybody can tell whether they are finite, or clip them: make the "
            "trainer with update_on_kvstore=False, a synchronous kvstore, dense weights and no "
            "compression"
        )
    if not reason:
        asked["update_on_kvstore"] = False


def check_half(trainer: Any) -> None:
    """float16 weights need float32 masters, or nothing that loss scaling saves reaches them."""
    if trainer._optimizer.multi_precision:
        return
    trained = [p for p in trainer._params if p.grad_req != "null"]
    half = [p.name for p in trained if np.dtype(p.dtype) == np.float16]
    if half:
        more = f" and {len(half) - 1} more are float16 parameters"
        raise MisuseError(
            f"{half[0]}{more if half[1:] else ' is a float16 parameter'}: the optimizer would take "
            "the scale out in float16, where small gradients vanish again. Make the trainer with "
            "optimizer_params={'multi_precision': True, ...}, which keeps float32 masters"
        )


def check_own(trainer: Any) -> None:
    held = getattr(trainer, "_amp_loss_scaler", None)
    if held is not None and held is not getattr(trainer, "_gradlift_scaler", None):
        raise MisuseError(
            "this trainer was given to MXNet's own amp.init_trainer() as well, and would be scaled "
            "twice: leave that call out, gradlift.mxnet's takes its place"
        )


def learning_rate(optimizer: Any) -> float:
    """NaN before the first update: a schedule that divides by their number cannot be called."""
    known = optimizer.lr_scheduler is None or optimizer.num_update > 0
    return float(optimizer.learning_rate) if known else math.nan

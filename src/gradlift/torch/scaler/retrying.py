"""A batch computed again: what is put back before, and a scale found before the first step."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import MisuseError

if TYPE_CHECKING:
    from .grad_scaler import GradScaler

_PASSES = 160  # a rule that halves gets from 2^126 to 2^-24 in 150


def total(losses: Any) -> Any:
    """What a closure returned, as one loss: a tuple or list is added up."""
    return sum(losses[1:], losses[0]) if isinstance(losses, (tuple, list)) else losses


class Parameters:
    """Looks like an optimizer to those who collect gradients, and cannot step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.param_groups = [{"params": params}]


class Replay:
    """Remembers what a forward and backward pass may change besides the optimizer's gradients.

    Without an optimizer: what a forward pass may change.
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.random = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        modules = [] if model is False else [model]
        self.buffers = [
            (owner, name, b, b.detach().clone())
            for m in modules
            for owner in m.modules()
            for name, b in owner._buffers.items()
            if b is not None
        ]
        self.grads: list[tuple[Tensor, Tensor | None]] = []
        if optimizer is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            others = [p for m in modules for p in m.parameters() if id(p) not in stepped]
            self.grads = [(p, None if p.grad is None else p.grad.detach().clone()) for p in others]

    def restore(self) -> None:
        random.setstate(self.random)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        with torch.no_grad():
            for owner, name, buffer, value in self.buffers:
                if buffer.shape != value.shape:  # an observer makes room at its first batch
                    buffer.resize_(value.shape)
                buffer.copy_(value)
                owner._buffers[name] = buffer  # forward may have put another tensor there
        for p, grad in self.grads:
            p.grad = None if grad is None else grad.clone()


@contextlib.contextmanager
def without_trace(model: torch.nn.Module) -> Iterator[Replay]:
    """Inside, parameters begin without gradients; afterwards gradients, buffers and random states
    are as they were."""
    kept = Replay(model)
    held = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in held:
            p.grad = None
        yield kept
    finally:
        kept.restore()
        for p, grad in held:
            p.grad = grad


def calibrate(
    scaler: GradScaler, closure: Callable[[], Any], model: torch.nn.Module, key: str | None
) -> float:
    """Backward passes over one batch until the rule keeps its scale; everything is put back."""
    if any(s.calls or s.windows for s in scaler._scales.values()):
        raise MisuseError(
            "calibrate() was called between scale() and update(): gradients of two scales would "
            "mix; call it before the first scale() of a step"
        )
    looked_at, sound = Parameters(list(model.parameters())), 0
    for _ in range(_PASSES):
        try:
            with without_trace(model):
                loss = total(closure())
                scaler.scale(loss, key=key).backward()
                scale = scaler.scale_of(key, loss.device)
                reading = scale.inspect(looked_at).reading
            assert reading is not None
            before, bad = scale.numbers(), bool(reading.nonfinite)
            _refuse(reading, loss)
            scale.advance(scale.combined(), retry=True)
        finally:
            for each in scaler._scales.values():
                each.clear()
        after = scale.numbers()
        if bad and after.scale == before.scale:
            raise MisuseError(
                f"gradients are not finite even at scale {after.scale:g}, though the loss is: look "
                "for inf or NaN in the backward pass of this batch"
            )
        sound += not bad
        if not bad and (after.scale == before.scale or sound > 1):
            if after.scale > before.scale:  # not tried on this batch
                scale.put(after._replace(scale=before.scale))
            break
    return float(scale.numbers().scale)


def _refuse(reading: Any, loss: torch.Tensor) -> None:
    """What no scale can be found with."""
    if reading.loss_nonfinite:
        raise MisuseError(
            f"calibrate() was given a batch whose loss is {float(loss.detach().sum())}: no scale "
            "can be found with it; give it another batch"
        )
    if not reading.checked:
        raise MisuseError(
            "calibrate() found no gradients on model=: pass the model that the loss was computed "
            "with"
        )


class Snapshot:
    """Parameters and state of an optimizer whose step may have to be undone."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.values = [p.detach().clone() for p in self.params]
        self.state = copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        with torch.no_grad():
            for p, value in zip(self.params, self.values):
                p.copy_(value)
        self.optimizer.load_state_dict(self.state)

"""What must be put back before a batch is computed again: random states, buffers, gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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

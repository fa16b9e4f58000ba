"""Micro-batches kept apart until each is known to be clean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._inspect import dense, look


class DropBad:
    """Moves each micro-batch's gradients into a side buffer if they are finite, else drops them."""

    def __init__(self, optimizer: Any, *, active: bool = True) -> None:
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.active = active
        self.sums: list[Tensor | None] = [p.grad for p in self.params]
        self.kept: list[int] = []
        """Indices of the micro-batches that were added up."""
        self.dropped: list[int] = []
        """Indices of those that were not."""
        self._seen = 0
        if active:
            self._clear()

    def _clear(self) -> None:
        for p in self.params:
            p.grad = None

    def micro_batch_done(self) -> None:
        """The gradients now in `.grad` are one micro-batch's: judge them."""
        grads = [dense(p.grad) for p in self.params if p.grad is not None]
        if not grads:
            return
        if look(grads, 1.0, amax=False).nonfinite:
            self.dropped.append(self._seen)
        else:
            self.kept.append(self._seen)
            with torch.no_grad():
                for i, p in enumerate(self.params):
                    if p.grad is not None:
                        held = self.sums[i]
                        self.sums[i] = p.grad if held is None else held.add_(p.grad)
        self._seen += 1
        self._clear()

    def finish(self) -> None:
        """Puts the sums where the optimizer looks for them."""
        if not self.active:
            return
        self.micro_batch_done()
        for p, total in zip(self.params, self.sums):
            p.grad = total

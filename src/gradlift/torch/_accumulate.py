"""Micro-batches kept apart until each is known to be clean."""

from __future__ import annotations

import torch
from torch import Tensor

from ._inspect import dense, look


class DropBad:
    """Moves each micro-batch's gradients into a side buffer if they are finite, else drops them."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        """Indices of the micro-batches that were added up."""
        self.dropped: list[int] = []
        """Indices of those that were not."""
        self._sums: dict[Tensor, Tensor | None] = {}
        self._seen = 0

    def expect(self, params: list[Tensor]) -> None:
        """A backward pass over these is about to come: what they hold already is put aside."""
        for p in params:
            if p not in self._sums:
                self._sums[p], p.grad = p.grad, None

    def micro_batch_done(self) -> None:
        """The gradients now in `.grad` are one micro-batch's: judge them."""
        grads = {p: p.grad for p in self._sums if p.grad is not None}
        if not grads:
            return
        if look([dense(g) for g in grads.values()], 1.0, amax=False).nonfinite:
            self.dropped.append(self._seen)
        else:
            self.kept.append(self._seen)
            with torch.no_grad():
                for p, g in grads.items():
                    held = self._sums[p]
                    self._sums[p] = g if held is None else held.add_(g)
        self._seen += 1
        for p in grads:
            p.grad = None

    def finish(self) -> None:
        """Puts the sums where the optimizer looks for them."""
        self.micro_batch_done()
        for p, total in self._sums.items():
            p.grad = total

"""Micro-batches kept apart until each is known to be clean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import MisuseError
from ..ranks.agreement import world_size
from .finite_check import dense, look


class DropBad:
    """Moves each micro-batch's gradients into a side buffer if they are finite, else drops them.

    `agree(bad, found, losses, params)` says what all ranks think of the micro-batch: was it bad,
    and did it leave any gradients? `count()` is how many losses were scaled in this window; those
    that left no gradients by themselves belong to the next micro-batch.
    """

    def __init__(
        self,
        agree: Callable[[bool, bool, range, list[Tensor]], tuple[bool, bool]],
        count: Callable[[], int],
    ) -> None:
        self.kept: list[int] = []
        """Indices of the micro-batches that were added up."""
        self.dropped: list[int] = []
        """Indices of those that were not."""
        self.losses_dropped: list[int] = []
        """Indices of their losses in the window."""
        self._agree, self._count, self._first = agree, count, count()
        self._sums: dict[Tensor, Tensor | None] = {}
        self._seen = 0
        self._expected = False

    def expect(self, params: list[Tensor]) -> None:
        """A backward pass over these is about to come: what they hold already is put aside."""
        self._expected = True
        for p in params:
            if p not in self._sums:
                self._sums[p], p.grad = p.grad, None

    def micro_batch_done(self) -> None:
        """The gradients now in `.grad` are one micro-batch's: judge them."""
        if not self._expected:
            return
        self._expected = False
        grads = {p: p.grad for p in self._sums if p.grad is not None}
        bad = bool(look([dense(g) for g in grads.values()], 1.0, amax=False).nonfinite)
        losses = range(self._first, self._count())
        bad, found = self._agree(bad, bool(grads), losses, list(self._sums))
        if not found:
            return
        self._first = losses.stop
        if bad:
            self.dropped.append(self._seen)
            self.losses_dropped += losses
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
        if self._sums and not self._seen and world_size(None) > 1:
            raise MisuseError(
                "drop_bad found no gradients on the parameters below the loss: FSDP hands them on "
                "to its shards during backward, where micro-batches cannot be distinguished. Leave "
                "drop_bad out: a bad window is then skipped as a whole"
            )

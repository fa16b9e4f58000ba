"""A fused kernel, one piece at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import MisuseError
from ._flat import Piece, Region


class OneByOne(TorchFunctionMode):
    """Hands a fused kernel one piece at a time, each converted just before, rounded just after.

    torch's fused optimizers end in one call with lists of tensors. Converting all gradients before
    it, and rounding all weights after it, would take them through memory three times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[int, tuple[Region, Piece]] = {}
        self.done = 0

    def add(self, region: Region, piece: Piece) -> None:
        if region.keep is None:
            piece.weight.grad = region.gradient(piece)
            return
        self.work[id(piece.weight)] = region, piece
        if piece.weight.grad is None:  # takes no memory, and nobody looks at its values
            nothing = torch.zeros((), device=region.device)
            piece.weight.grad = nothing.expand_as(piece.weight)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "__name__", "").startswith("_fused_"):
            return func(*args, **kwargs)
        as_they_are = []
        for i, weight in enumerate(args[0]):
            if id(weight) not in self.work:
                as_they_are.append(i)
                continue
            region, piece = self.work[id(weight)]
            region.load(piece)
            state = ([each[i]] if each else [] for each in args[2:])
            func([weight], [region.gradient(piece)], *state, **kwargs)
            region.store(piece)
            self.done += 1
        if as_they_are:
            func(*([each[i] for i in as_they_are] if each else [] for each in args), **kwargs)

    def finish(self) -> None:
        """All of them? Nothing may pass for stepped that was not."""
        if self.done != len(self.work):
            raise MisuseError(
                f"this optimizer's fused kernel stepped {self.done} of {len(self.work)} pieces: "
                "this version of torch is not known to MasterWeights; pass fused=False"
            )

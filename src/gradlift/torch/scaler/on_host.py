"""A scale whose state is Python numbers: on the CPU reading a scalar is free."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, Literal

import torch
from torch import Tensor

from ...core import clip_coefficient, loss_blamed, loss_level
from ...formats import FP32
from ...namespace import namespace
from ...rules import ScaleState
from ..ranks.agreement import NOT_TAKEN, Agreed, RankRow, agree
from ..ranks.group import SAME
from ..ranks.sharding import value_of
from .finite_check import Inspection, kind_of, leaves_format, look
from .window import Window


class OnHost:
    """Where a scale lives as long as no loss and no parameter is on a device.

    `OnDevice` has the same methods. `state` are numbers here, and 0-d tensors there.
    """

    device = torch.device("cpu")
    xp = None
    late: Literal[False] = False
    """Is a step concluded one step later?"""

    def __init__(self, state: ScaleState) -> None:
        self.state, self.skipped = state, 0

    def numbers(self) -> ScaleState:
        """The state in Python numbers."""
        return self.state

    def put(self, state: ScaleState) -> None:
        """Sets the state, from numbers."""
        self.state = state

    def cap(self, ceiling: float) -> None:
        self.state = self.state._replace(scale=min(self.state.scale, ceiling))

    def move(self, state: ScaleState, skips: Any) -> None:
        """The state after a step; `skips` is whether it was skipped."""
        self.state = state
        self.skipped += bool(skips)

    def inverse(self) -> Any:
        """1/scale, rounded to float32 as torch does: float64 gradients show it at an odd scale."""
        return namespace(None).f32(1 / self.state.scale)

    # losses

    def flag(self, loss: Tensor, recorded: bool) -> tuple[Any, Any]:
        """The loss as one number, and whether it is non-finite."""
        if type(loss) is not Tensor:
            loss = value_of(loss)
        value = loss.detach().float().sum().item() if loss.numel() != 1 else loss.item()
        return value, not math.isfinite(value)

    def blamed(self, flags: Sequence[Any], nonfinite: Any) -> Any:
        """Is a loss to blame?"""
        return loss_blamed(loss_level(flags), nonfinite)

    def level(self, flags: Sequence[Any]) -> Any:
        return loss_level(flags)

    # gradients

    def look(
        self, window: Window, full: Set[int], *, norm: bool, amax: bool, clips: bool
    ) -> Inspection:
        """Those at the positions `full` are no part of amax. One look for each weight that
        parameters have among the ranks."""
        inverse = 1.0 if window.unscaled else 1 / self.state.scale
        common = window.group.common_weight
        if common is not None:
            found = look(window.source.elements, inverse, amax=amax, norm=norm, full=full)
            if not window.source.gathered and leaves_format(window.source.elements, inverse):
                found = found._replace(nonfinite=True, norm=math.nan)
            return found._replace(lengths=[(common, found.norm)])
        kinds: dict[float, list[int]] = {}
        for i, weight in enumerate(window.group.weights_of(window.source.params)):
            kinds.setdefault(weight, []).append(i)
        each, parts = window.source.each(), {}
        for weight, at in sorted(kinds.items()):
            left_out = {n for n, i in enumerate(at) if i in full}
            parts[weight] = look(
                [each[i] for i in at], inverse, amax=amax, norm=norm, full=left_out
            )
        bad = any(found.nonfinite for found in parts.values())
        bad = bad or (not window.source.gathered and leaves_format(each, inverse))
        total = math.hypot(*(found.norm for found in parts.values()))
        return Inspection(
            bad,
            math.nan if bad else total,
            max((found.amax for found in parts.values()), default=0.0 if amax else math.inf),
            lengths=[(weight, found.norm) for weight, found in parts.items()],
        )

    def look_again(self, window: Window, which: list[int]) -> Any:
        """Is any of the gradients at these positions non-finite?"""
        inverse = 1.0 if window.unscaled else 1 / self.state.scale
        each = window.source.each()
        return look([each[i] for i in which], inverse, amax=False).nonfinite

    def agree(self, window: Window, mine: RankRow) -> Agreed:
        """What all ranks show together. This rank's norms and culprit are put in here."""
        own, shared = _own_and_shared_norm(window)
        mine = mine._replace(own_norm=own, shared_norm=shared, culprit=_first_culprit(window))
        return agree(mine, window.group)

    def lacks_norm(self, window: Window) -> bool:
        assert window.reading is not None
        return not window.reading.nonfinite and math.isnan(window.norm)

    def clip(self, window: Window, max_norm: float) -> Tensor:
        """Notes the coefficient for `step`; returns the true norm. By one that leaves float32
        nothing can be divided: such a step is not made."""
        norm = torch.tensor(window.norm, dtype=torch.float32)
        if window.norm > FP32.max:
            assert window.reading is not None
            window.norm = math.nan
            window.reading = window.reading._replace(nonfinite=True, norm=math.nan)
        elif not math.isnan(window.norm):
            window.coefficient = clip_coefficient(window.norm, max_norm)
        return norm


def _first_culprit(window: Window) -> int:
    """Of this rank: twice the position of the first culprit, plus 1 for inf or 2 for NaN."""
    if not window.culprits:
        return 0
    p = next(p for p in reversed(window.source.params) if p.grad is not None and kind_of(p.grad))
    return 2 * window.group.position(p) + (2 if window.culprits[0].kind == "nan" else 1)


def _own_and_shared_norm(window: Window) -> tuple[float, float]:
    """Norms of what only some ranks hold, weighted, and of what all hold; -1 if not taken."""
    lengths = [] if window.found is None else window.found.lengths
    own = math.hypot(*(math.sqrt(w) * n for w, n in lengths if w != SAME))
    same = [n for w, n in lengths if w == SAME]
    shared = same[0] if len(same) == 1 else math.hypot(*same)
    return NOT_TAKEN if math.isnan(own) else own, NOT_TAKEN if math.isnan(shared) else shared

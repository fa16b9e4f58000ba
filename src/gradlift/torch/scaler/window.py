"""One optimizer between two updates: what its gradients showed, and what came of its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core import Cause, Culprit, Finished, Verdict
from ...reading import Reading
from ..gradient_source import GradientSource
from ..ranks.group import ALONE, RankGroup
from .finite_check import Inspection

APPLIED = (Cause.NONE, Cause.NO_GRADIENTS, Cause.WEIGHT_RANGE)
"""Causes of a step that nothing went wrong in."""


@dataclass
class MicroBatch:
    """One scaled loss of a window."""

    loss_nonfinite: Any
    """A bool, or a bool tensor on a device."""
    dropped: bool = False


@dataclass
class Window:
    """One optimizer between two updates."""

    source: GradientSource
    """Where its gradients are, and how it is stepped with them."""
    group: RankGroup = ALONE
    """The ranks that agree on its step."""
    found: Inspection | None = None
    found_again: tuple[Inspection, ...] = ()
    """Device only: of gradients that were changed after the look."""
    reading: Reading | None = None
    norm: Any = math.nan
    """Of the true gradients; a tensor on a device. NaN where it was not taken."""
    norm_taken: bool = False
    norm_shown: bool = False
    """Is the norm in the result, too? Not if it was taken only for a recorded run around."""
    loss_known: Any = False
    """Was a loss scaled, by any rank of the group?"""
    culprits: tuple[Culprit, ...] = ()
    first_culprit: Any = 0
    """Of any rank: see `RankRow.culprit`."""
    marks: list[tuple[Tensor, int]] | None = None
    """The gradients when another loss was scaled after the look, with their versions."""
    mixed: bool = False
    """Has a gradient changed since, in the backward pass of the other loss?"""
    fresh: bool = False
    """The gradients were looked at in the call that is still running."""
    unscaled: bool = False
    coefficient: Any = 1.0
    """The clip coefficient that `step` has still to apply."""
    deferred: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What `step` was called with, where `update` is to carry it out."""
    changed_by_hook: bool = False
    """A hook inside optimizer.step() made a gradient non-finite; nothing was written."""
    verdict: Verdict | None = None
    """None before `step`, and after it where only a device knows."""
    finished: Finished | Callable[[], Finished] | None = None
    """What `step` came to; on a device, how to read it."""


def first_bad(flags: Sequence[Any], dropped: Sequence[int]) -> int | None:
    """The first of several micro-batches that was dropped, or whose loss was non-finite; None if
    there is none: gradients arrive as one sum."""
    if dropped:
        return dropped[0]
    return next((i for i, bad in enumerate(flags) if bad), None) if len(flags) > 1 else None


def shown(finished: Sequence[Finished]) -> Finished:
    """Of several optimizers' steps the first that was not applied, else the last."""
    return next((f for f in finished if f.cause not in APPLIED), finished[-1])

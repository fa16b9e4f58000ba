"""Were gradients changed by hand between a scaled loss's backward pass and the scaler's next call?

Looked at in sampled steps, on a few numbers of each optimizer's first gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from .calls import first_gradient

_PART = 64  # numbers of the gradient that are compared
_SAME = 1e-3  # relative: the rounding of float16


class Edits:
    """Keeps a part of a gradient after the backward pass, and compares it.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> w.grad = torch.tensor([2.0, 4.0])
    >>> sgd, edits = torch.optim.SGD([w], lr=1.0), Edits()
    >>> edits.keep([sgd])
    >>> w.grad.mul_(0.5), edits.found(sgd)
    (tensor([1., 2.]), 'times 0.5')
    """

    def __init__(self) -> None:
        self.kept: WeakKeyDictionary[Any, tuple[int, int, Tensor]] = WeakKeyDictionary()
        """By optimizer: the gradient's id and version, and a part of it."""

    def keep(self, optimizers: Iterable[Any]) -> None:
        """After a backward pass."""
        for optimizer in optimizers:
            g = first_gradient(optimizer)
            if g is not None and _is_plain(g):
                self.kept[optimizer] = id(g), g._version, _part(g).clone()

    def forget(self) -> None:
        """Gradients are changed by a call that is noted itself."""
        self.kept.clear()

    def found(self, optimizer: Any) -> str:
        """What was done to it since: "times 0.5", "added", or "" for nothing, or for elements that
        were set to zero."""
        stamp, g = self.kept.pop(optimizer, None), first_gradient(optimizer)
        if stamp is None or g is None or not _is_plain(g) or (id(g), g._version) == stamp[:2]:
            return ""
        before, after = stamp[2].float(), _part(g).float()
        if before.shape != after.shape or not bool((after[before == 0] == 0).all()):
            return "added"
        ratios = (after / before)[(before != 0) & (after != 0)]
        if not ratios.numel():
            return ""
        factor = float(ratios.median())
        if not bool(((ratios - factor).abs() <= _SAME * abs(factor)).all()):
            return "added"
        return "" if abs(factor - 1) <= _SAME else f"times {factor:.3g}"


def _is_plain(g: Tensor) -> bool:
    """Can a part of it be read here, without waiting?"""
    return type(g) is Tensor and g.device.type == "cpu" and not g.is_sparse and not g.is_complex()


def _part(g: Tensor) -> Tensor:
    flat = g.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _PART) or 1]

"""Finds the variable of the script from which a loss got its inf or NaN, such as a target."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...torch.nested import named_tensors
from ..places import Places
from .finder import Origin, nodes_of, saved

_SAVED = ("self", "other", "target")


def bad_variable(losses: list[Tensor], places: Places, frame: types.FrameType) -> Origin | None:
    """A tensor of the script that was not computed and that is inf or NaN exactly where a tensor
    is that the graph of a loss has saved.

    >>> import sys
    >>> wanted = torch.tensor([1.0, torch.nan])
    >>> loss = (torch.zeros(2, requires_grad=True) - wanted).square().sum()
    >>> bad_variable([loss], Places(), sys._getframe()).input
    'wanted, 1 of 2 elements, first at [1]'
    """
    wrong = list(_wrong(losses))
    if not wrong:
        return None
    sizes = {bad.numel() for bad in wrong}
    for name, t in _variables(frame, places):
        if t.numel() not in sizes or t.requires_grad or not _can_be_read(t):
            continue
        bad = ~torch.isfinite(t)
        if any(_equal(bad, other) for other in wrong):
            at = bad.nonzero()
            found = "nan" if bool(t.isnan().any()) else "inf"
            index = ", ".join(str(int(i)) for i in at[0])
            text = f"{name}, {len(at)} of {t.numel()} elements, first at [{index}]"
            return Origin(found, "input", op="loss", input=text, before=places.of(frame))
    return None


def _can_be_read(t: Tensor) -> bool:
    """Not sharded, sparse or meta; and its memory was not given back, as FSDP does."""
    if type(t) is not Tensor or t.layout is not torch.strided or t.device.type == "meta":
        return False
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
    enough = t.untyped_storage().nbytes() >= (last + 1) * t.element_size()
    return enough and t.is_floating_point()


def _wrong(losses: list[Tensor]) -> Iterator[Tensor]:
    """Where the tensors are not finite that a graph has saved. A single number says nothing."""
    for node in nodes_of(losses):
        for name in _SAVED:
            t = saved(node, name)
            if t is not None and t.is_floating_point() and t.numel() > 1:
                bad = ~torch.isfinite(t)
                if bool(bad.any()):
                    yield bad


def _equal(a: Tensor, b: Tensor) -> bool:
    same = a.numel() == b.numel() and a.device == b.device
    return same and bool((a.reshape(-1) == b.reshape(-1)).all())


def _variables(frame: types.FrameType | None, places: Places) -> Iterator[tuple[str, Tensor]]:
    """The tensors in variables of the script's own functions, the innermost first."""
    while frame is not None:
        if places.place(frame.f_code.co_filename, frame.f_lineno) is not None:
            for name, value in list(frame.f_locals.items()):
                yield from named_tensors(value, name)
                if name == "self":
                    own: Any = getattr(value, "__dict__", {})
                    for attribute, part in list(own.items()):
                        yield from named_tensors(part, f"self.{attribute}")
        frame = frame.f_back

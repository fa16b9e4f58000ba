"""A region's gradients: small ones are gathered into one stretch, large ones read where they are.

`.grad` stays autograd's and the user's. Views of one buffer that backward adds to would save the
gathering, but adding costs as much as gathering does; a large gradient would be read and written
once more for nothing.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MisuseError
from ._inspect import flat
from ._names import name_of

SHARED = -1  # the source of whatever lies where the small parameters are


class Taken(NamedTuple):
    """Gradients as they were found."""

    grads: list[Tensor | None]
    """`.grad` of each parameter."""
    sources: dict[int, Tensor]
    """Where they are, flat: all small ones together, each large one by its index."""
    shown: list[Tensor | None] | None = None
    """If the sources are held, in float32 and without the scale, since `unscale_` was called: what
    `.grad` showed of them then."""

    @property
    def held(self) -> bool:
        return self.shown is not None


class Gradients:
    """`starts` are the places of the first `n_small` parameters in a stretch of `room`."""

    def __init__(self, params: list[Tensor], starts: list[int], n_small: int, room: int) -> None:
        self.params, self.starts, self.n_small = params, starts, n_small
        first = params[0]
        self.narrow = first.dtype in (torch.float16, torch.bfloat16)
        self.shared = torch.empty(room, dtype=first.dtype, device=first.device)
        self.shaped = [i for i, p in enumerate(params[:n_small]) if p.dim() != 1]
        self.padding: dict[int, Tensor] = {}  # zeros before a parameter
        at = 0
        for i, p in enumerate(params[:n_small]):
            if starts[i] > at:
                self.padding[i] = torch.zeros(starts[i] - at, dtype=p.dtype, device=p.device)
            at = starts[i] + p.numel()
        self.taken: Taken | None = None

    def take(self) -> Taken:
        """Where the gradients are now: as held, unless they were exchanged or changed since."""
        grads = [p.grad for p in self.params]
        taken = self.taken
        if taken is not None and taken.held and all(map(is_, grads, taken.grads)):
            self.take_changes(taken)
            return taken
        sources = {}
        if not all(map(is_, grads[: self.n_small], repeat(None))):
            sources[SHARED] = self.gather(grads[: self.n_small])
        for i in range(self.n_small, len(grads)):
            if (g := grads[i]) is not None:
                sources[i] = flat_like(g, self.params[i])
        self.taken = Taken(grads, sources)
        return self.taken

    def gather(self, small: list[Tensor | None]) -> Tensor:
        """Small gradients end to end, with zeros for those that are missing."""
        if any(map(is_, small, repeat(None))):
            small = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, small)]
        found: list[Tensor] = small  # type: ignore[assignment]
        for i in self.shaped:
            found[i] = flat_like(found[i], self.params[i])
        if self.padding:
            padded = ((self.padding.get(i), g) for i, g in enumerate(found))
            found = [x for pair in padded for x in pair if x is not None]
        if any(g.dtype is not self.shared.dtype for g in found):  # p.grad_dtype: wider than p
            return torch.cat([g.float() for g in found])
        try:
            return torch.cat(found, out=self.shared)
        except (RuntimeError, NotImplementedError):
            for p, g in zip(self.params, small):
                if g is not None and g.layout is not torch.strided:
                    refuse_sparse(p)
            raise

    def held_source(self, taken: Taken, i: int) -> Tensor:
        """One parameter's part of what is held."""
        if i >= self.n_small:
            return taken.sources[i]
        a = self.starts[i]
        return taken.sources[SHARED][a : a + self.params[i].numel()]

    def take_changes(self, taken: Taken) -> None:
        """A gradient that no longer shows what it did was changed by hand: then it counts."""
        for i, (p, g, shown) in enumerate(zip(self.params, taken.grads, taken.shown or [])):
            if g is not None and shown is not None:
                changed = (g != shown) & ~(g.isnan() & shown.isnan())
                if changed.any():
                    self.held_source(taken, i).copy_(flat_like(g, p))
                    shown.copy_(g)

    def hold(self, factor: float | Tensor) -> None:
        """Gradients * factor in float32, for `step`; `.grad` shows them as well as it can."""
        taken = self.take()
        if not self.narrow:
            given = [(p, g) for p, g in zip(self.params, taken.grads) if g is not None]
            multiply([p for p, _ in given], [g for _, g in given], factor)
            return
        sources = {i: g.to(torch.float32, copy=True).mul_(factor) for i, g in taken.sources.items()}
        shown: list[Tensor | None] = []
        self.taken = Taken(taken.grads, sources, shown)
        for i, (p, g) in enumerate(zip(self.params, taken.grads)):
            if g is not None:
                if _is_expanded(g):
                    p.grad = taken.grads[i] = g = torch.empty_like(p)
                g.copy_(shaped(self.held_source(self.taken, i), p))
            shown.append(None if g is None else g.clone())


def _is_expanded(g: Tensor) -> bool:
    """Many elements, one place in memory: it cannot be written."""
    return 0 in g.stride() and g.numel() > 1


def multiply(params: list[Tensor], grads: list[Tensor], factor: float | Tensor) -> None:
    """grads *= factor, in place, in one pass a device; what cannot be written is replaced."""
    if not grads or (isinstance(factor, float) and factor == 1.0):
        return
    with torch.no_grad():
        for i, (p, g) in enumerate(zip(params, grads)):
            if _is_expanded(g):
                p.grad = grads[i] = g.clone(memory_format=torch.contiguous_format)
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(grads, factor)
            return
        for device in dict.fromkeys(g.device for g in grads):
            here = [g for g in grads if g.device == device]
            torch._foreach_mul_(here, factor.to(device, non_blocking=True))


def flat_like(g: Tensor, p: Tensor) -> Tensor:
    """The elements of `g` in the order in which those of `p` lie in memory."""
    if g.layout is not torch.strided:
        refuse_sparse(p)
    if g.stride() != p.stride():
        g = torch.empty_like(p, dtype=g.dtype).copy_(g)
    return flat(g)


def shaped(elements: Tensor, p: Tensor) -> Tensor:
    """The reverse: flat elements in the shape and memory order of `p`."""
    return elements.as_strided(p.shape, p.stride(), elements.storage_offset())


def refuse_sparse(p: Tensor) -> None:
    raise MisuseError(
        f"the gradient of {name_of(p)} is sparse; MasterWeights is for dense ones: make the "
        "embedding with sparse=False, or give it an optimizer of its own"
    )

"""The gradients of a `MasterWeights`, and of one of its regions.

Small ones are gathered into one stretch, large ones read where they are. `.grad` stays autograd's
and the user's. Views of one buffer that backward adds to would save the gathering, but adding costs
as much as gathering does; a large gradient would be read and written once more for nothing.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import MisuseError
from ..gradient_source import Found, GradientSource, is_expanded, multiply
from ..names import name_of
from ..scaler.finite_check import flat

SHARED = -1  # the source of whatever lies where the small parameters are


class MasterGradients(GradientSource):
    """Multiplied, they are held in float32 until the step; `.grad` shows them in 16 bits."""

    gathered = True
    half_way = (
        "Some masters may have moved and others not; the 16-bit weights are what their masters "
        "round to: those that moved will move twice."
    )
    divides_by_numbers = True

    @torch.no_grad()
    def find(self, *, by_parameter: bool = False, spread: bool = False) -> Found:
        """float32 gradients are looked at as the plain optimizer's are, so that their norm is the
        same to the bit; 16-bit ones where they lie together."""
        optimizer = self.optimizer
        optimizer._take()
        self.params, self.held, self.elements = [], [], []
        for g, places in enumerate(optimizer._places):
            grads: list[Any]
            if places.plain:
                plain = [p for p in places.plain if p.grad is not None]
                grads = [p.grad for p in plain]
                self.params += plain
                self.held += grads
                self.elements += grads
            for region in optimizer._regions:
                if region.group == g and region.keep is not None:
                    params, grads, sources = region.gradients.found()
                    self.params += params
                    self.held += grads
                    self.elements += sources
        if by_parameter:
            self.elements = self.held
        return self.params, self.held, self.elements

    def each(self) -> list[Tensor]:
        homes = map(self.optimizer._home.get, self.params)
        wide = [home and home[0].gradients.held(home[1]) for home in homes]
        return [g if w is None else w for g, w in zip(self.held, wide)]

    @torch.no_grad()
    def multiply(self, factor: float | Tensor) -> None:
        self.optimizer._multiply_direct(factor)
        for region in self.optimizer._regions:
            region.gradients.hold(factor)
        self.find()

    @torch.no_grad()
    def changed(self) -> bool:
        """Those held in float32 are compared by value: what was written to `.grad`, by any way, is
        copied there."""
        if any(region.gradients.is_held for region in self.optimizer._regions):
            self.optimizer._take()
        return super().changed()

    def changed_at(self, noted: dict[int, int] | None) -> list[int]:
        return super().changed_at(noted) or list(range(len(self.held)))

    def _stamps(self) -> dict[int, int]:
        stamps = super()._stamps()
        for region in self.optimizer._regions:
            if region.gradients.is_held:
                sources = region.gradients.taken.sources.values()
                stamps.update({id(s): s._version for s in sources})
        return stamps

    def _stepped(self) -> Any:
        return self.optimizer._inner

    def step(
        self,
        grad_scale: float | Tensor,
        found_inf: Tensor | None,
        *args: Any,
        just_read: bool = False,
        **kwargs: Any,
    ) -> Any:
        hooked = self.has_hooks() if self.hooked is None else self.hooked
        self.optimizer._just_taken = just_read and not hooked
        try:
            return super().step(grad_scale, found_inf, *args, **kwargs)
        finally:
            self.optimizer._just_taken = False

    def multiplied_step(self, factor: float | Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.step(1 / factor, None, *args, **kwargs)

    def weights(self) -> list[Tensor]:
        return self.optimizer.masters

    def out_of_range(self) -> Any:
        return self.optimizer.out_of_range

    def at_limit(self) -> list[Tensor]:
        return self.optimizer.at_limit()


class Taken(NamedTuple):
    """Gradients as they were found."""

    grads: list[Tensor | None]
    """`.grad` of each parameter."""
    sources: dict[int, Tensor]
    """Where they are, flat: all small ones together, each large one by its index."""
    shown: list[Tensor | None] | None = None
    """If the sources are held, in float32 and without the scale, since `unscale_` was called: what
    `.grad` showed of them then."""


class RegionGradients:
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

    @property
    def is_held(self) -> bool:
        """Was `unscale_` called, so that gradients are held in float32?"""
        return self.taken is not None and self.taken.shown is not None

    def take(self) -> Taken:
        """Where the gradients are now: as held, unless they were exchanged or changed since."""
        grads = [p.grad for p in self.params]
        taken = self.taken
        if taken is not None and taken.shown is not None and all(map(is_, grads, taken.grads)):
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
        try:
            for i in self.shaped:
                found[i] = found[i].reshape(-1)
            if self.padding:
                padded = ((self.padding.get(i), g) for i, g in enumerate(found))
                found = [x for pair in padded for x in pair if x is not None]
            if {g.dtype for g in found} != {self.shared.dtype}:  # p.grad_dtype: wider than p
                return torch.cat([g.float() for g in found])
            return torch.cat(found, out=self.shared)
        except (RuntimeError, NotImplementedError):
            for p, g in zip(self.params, small):
                if g is not None and g.layout is not torch.strided:
                    refuse_sparse(p)
            raise

    def found(self) -> Found:
        """The parameters with a gradient, `.grad` of each, and the tensors that hold them all."""
        assert self.taken is not None
        params, grads = self.params, self.taken.grads
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        return params, grads, list(self.taken.sources.values())  # type: ignore[return-value]

    def held(self, i: int) -> Tensor | None:
        """One parameter's float32 gradient, since `unscale_` was called."""
        taken, p = self.taken, self.params[i]
        if taken is None or taken.shown is None or taken.grads[i] is None:
            return None
        if i >= self.n_small:
            return shaped(taken.sources[i], p)
        a = self.starts[i]
        return shaped(taken.sources[SHARED][a : a + p.numel()], p)

    def take_changes(self, taken: Taken) -> None:
        """A gradient that no longer shows what it did was changed by hand: then it counts."""
        for i, (g, shown) in enumerate(zip(taken.grads, taken.shown or [])):
            if g is not None and shown is not None:
                changed = (g != shown) & ~(g.isnan() & shown.isnan())
                if changed.any():
                    self.held(i).copy_(g)  # type: ignore[union-attr]
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
                if is_expanded(g):
                    p.grad = taken.grads[i] = g = torch.empty_like(p)
                g.copy_(self.held(i))  # type: ignore[arg-type]
            shown.append(None if g is None else g.clone())


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

"""One read of an optimizer's scaled gradients: finite? how large? which norm?

On the CPU a scalar is free to read, so the answer is Python numbers. Elsewhere it stays in 0-d
tensors on the device and nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats import FP16, FP32
from ..ranks.sharding import local

_MAX = FP32.max
_SMALL = 2**12  # elements: gradients up to this size are looked at together
_CACHED = 2**18  # elements: a piece that is still in the cache when it is read again
_LARGE = 2**22  # elements: where a piece is read only once
_TINY = 1e-20  # a total below it may have lost digits to float32's underflow


class Inspection(NamedTuple):
    """What the scaled gradients showed."""

    nonfinite: Any
    """bool, or a bool tensor on a device."""
    norm: Any
    """Norm of the true gradients; NaN where it was not taken."""
    amax: Any
    """Largest finite |g|; inf where it was not taken."""
    peaks: Any = None
    """Device only: the largest |g| of each tensor that has elements, non-finite where it is."""
    order: tuple[int, ...] = ()
    """Device only: which gradient each peak belongs to."""
    lengths: Any = None
    """Norms of the parts: on the host pairs of weight and norm, by kind of parameter; on a device
    a tensor, the norm of each gradient, None where it was not taken."""


def dense(gradient: Tensor) -> Tensor:
    """The elements to look at: a sparse gradient's values, this rank's part of one that is spread
    over ranks, everything else as it is."""
    return gradient._values() if gradient.is_sparse else local(gradient)


def flat(g: Tensor) -> Tensor:
    """All elements in one dimension; a copy only if memory order leaves no other way."""
    if g.dim() == 1 and g.is_contiguous():
        return g
    if not g.is_contiguous() and g.dim() > 1:  # channels_last and other permutations are dense
        strides = g.stride()
        order = sorted(range(g.dim()), key=lambda d: -strides[d])
        g = g.permute(order)
    return g.reshape(-1)


def look(
    grads: list[Tensor],
    inverse: float,
    *,
    amax: bool,
    norm: bool = True,
    full: Set[int] = frozenset(),
) -> Inspection:
    """The CPU's look: one dot product gives the norm and the finite check in one read.

    Read in pieces that fit the cache, so that amax, where it is wanted, costs no second read from
    memory, and so that a float32 sum stays exact to 1e-5 at least. A sum of squares that is not
    finite is confirmed exactly, and so is a total so small that squares may have vanished.
    `inverse` is 1/scale: what counts is the gradient that will be used, so one that leaves float32
    on the way is not finite. Gradients at the positions `full` are no part of amax. The norm is
    the same to the bit with and without amax, since a recorded run must clip like a plain one.
    """
    if amax and not norm:
        return _peaks_only(grads, inverse, full)
    squares, largest, top = 0.0, 0.0, 0.0
    for piece, sources, where in _pieces(grads, _CACHED):
        s = torch.dot(piece, piece).item()
        if not s < math.inf:
            s, peak = _exactly(sources)
            if math.isinf(peak):
                return Inspection(True, math.nan, _finite_amax(grads, full) if amax else math.inf)
        if amax:
            part = piece if full.isdisjoint(where) else _without(full, sources, where)
            low, high = torch.aminmax(part)
            top = max(top, -low.item(), high.item())
        squares += s
        largest = max(largest, s)
    if squares < _TINY:
        squares = math.fsum(_exactly(sources)[0] for _, sources, _ in _pieces(grads, _LARGE))
    # Rare: only then is the peak itself needed.
    if math.sqrt(largest) * inverse > _MAX and _finite_amax(grads) * inverse > _MAX:
        return Inspection(True, math.nan, top if amax else math.inf)
    return Inspection(False, math.sqrt(squares) * inverse, top if amax else math.inf)


def _peaks_only(grads: list[Tensor], inverse: float, full: Set[int]) -> Inspection:
    """amax and the finite check, no norm: aminmax lets NaN through, and inf is the largest."""
    top = 0.0
    for piece, sources, where in _pieces(grads, _LARGE):
        low, high = torch.aminmax(piece)
        peak = max(-low.item(), high.item())
        if not peak * inverse <= _MAX:
            return Inspection(True, math.nan, _finite_amax(grads, full))
        if not full.isdisjoint(where):
            peak = _amax(_without(full, sources, where))
        top = max(top, peak)
    return Inspection(False, math.nan, top)


def _without(full: Set[int], sources: list[Tensor], where: list[int]) -> Tensor:
    """A piece without what comes from the gradients at the positions `full`; a zero if that is
    all."""
    return torch.cat([g for g, i in zip(sources, where) if i not in full] or [torch.zeros(1)])


def _pieces(grads: list[Tensor], size: int) -> Iterator[tuple[Tensor, list[Tensor], list[int]]]:
    """All elements as flat float32 or float64 pieces of at most `size`, and where they come from:
    the tensors, and their positions in `grads`.

    Small gradients are put together: thousands of them cost one product instead of thousands.
    """
    small: list[Tensor] = []
    where: list[int] = []
    held = 0
    room: Tensor | None = None  # for 16-bit pieces, each in float32 until the next one comes
    for i, g in enumerate(grads):
        n = g.numel()
        if n == 0:
            continue
        if n <= _SMALL and g.dtype is torch.float32:
            small.append(g if g.dim() == 1 and g.is_contiguous() else flat(g))
            where.append(i)
            held += n
            if held >= _CACHED:
                yield torch.cat(small), small, where
                small, where, held = [], [], 0
            continue
        v = flat(g)
        if v.dtype in (torch.float16, torch.bfloat16):
            if room is None:
                room = torch.empty(_CACHED)
            for part in v.split(_CACHED) if n > _CACHED else (v,):
                yield room[: part.numel()].copy_(part), [part], [i]
        elif n <= size:
            yield v, [v], [i]
        else:
            for part in v.split(size):
                yield part, [part], [i]
    if small:
        yield torch.cat(small), small, where


def _exactly(parts: list[Tensor]) -> tuple[float, float]:
    """Sum of squares and amax, inf if any element is not finite; slow and always right."""
    if not all(bool(torch.isfinite(g).all()) for g in parts):
        return math.inf, math.inf
    peak = max(_amax(g) for g in parts)
    if peak == 0:
        return 0.0, 0.0
    scaled = [g.to(torch.float64) / peak for g in parts]
    return math.fsum(torch.dot(v, v).item() for v in scaled) * peak * peak, peak


def _amax(g: Tensor) -> float:
    if g.numel() == 0:
        return 0.0
    low, high = torch.aminmax(g)
    return max(-low.item(), high.item())


def _finite_amax(grads: list[Tensor], full: Set[int] = frozenset()) -> float:
    """amax of the finite elements, for a step that is not applied anyway."""
    kept = (torch.nan_to_num(g, 0.0, 0.0, 0.0) for i, g in enumerate(grads) if i not in full)
    return max(map(_amax, kept), default=0.0)


def device_look(
    grads: list[Tensor],
    inverse: Tensor,
    *,
    norm: bool,
    amax: bool = False,
    clips: bool = False,
    full: Set[int] = frozenset(),
) -> Inspection:
    """The accelerator's look: per-tensor peaks are exact, and everything stays on the device.

    Gradients on several devices are combined where `inverse` lies. If the norm `clips`, one that
    leaves float32 (it takes elements above 1e19, as scaled) counts as non-finite. Gradients at the
    positions `full` are no part of amax.
    """
    home = inverse.device
    devices = dict.fromkeys([g.device for g in grads])
    peaks, norms, order, tops = [], [], [], []
    for device in devices:
        indices = [i for i, g in enumerate(grads) if g.device == device and g.numel()]
        if not indices:
            continue
        here = [grads[i] for i in indices]
        order += indices
        each = [p.float() for p in torch._foreach_norm(here, math.inf)]
        peaks.append(torch.stack(each).to(home, non_blocking=True))
        if full:
            half = [p for i, p in zip(indices, each) if i not in full]
            tops += [torch.stack(half).to(home, non_blocking=True)] if half else []
        if norm:
            norms.append(torch.stack(_lengths(here)).to(home, non_blocking=True))
    if not peaks:
        zero = torch.zeros_like(inverse)
        return Inspection(zero.bool(), zero, zero, None)
    every = peaks[0] if len(peaks) == 1 else torch.cat(peaks)
    used = every.max() * inverse  # max of a tensor with NaN is NaN
    total: Any = math.nan
    lengths: Any = None
    if norm:
        lengths = (norms[0] if len(norms) == 1 else torch.cat(norms)) * inverse
        total = torch.linalg.vector_norm(lengths)
        if clips:
            used = torch.maximum(used, total)  # NaN wins here as well
    top: Any = math.inf
    if amax:
        of = torch.cat(tops) if tops else every
        top = torch.where(torch.isfinite(of), of, 0.0).max()
    return Inspection(not_finite(used), total, top, every, tuple(order), lengths)


def leaves_format(grads: list[Tensor], inverse: float) -> bool:
    """Is a float16 gradient beyond float16 once the scale is taken out in place? (bfloat16 has
    float32's range.)

    >>> leaves_format([torch.tensor([30000.0]).half()], 2.0)
    False
    >>> leaves_format([torch.tensor([30000.0]).half()], 4.0)
    True
    """
    if inverse <= 1:
        return False
    return any(g.dtype is torch.float16 and _amax(g) * inverse > FP16.max for g in grads)


def device_leaves_format(grads: list[Tensor], found: Inspection, inverse: Tensor) -> Any:
    """The same on a device, by the peaks that were taken."""
    half = [k for k, i in enumerate(found.order) if grads[i].dtype is torch.float16]
    if not half:
        return False
    return torch.stack([found.peaks[k] for k in half]).max() * inverse > FP16.max


def _lengths(grads: list[Tensor]) -> list[Tensor]:
    """The norm of each, in float32 at least."""
    if torch.float64 not in {g.dtype for g in grads}:
        return list(torch._foreach_norm(grads, 2, dtype=torch.float32))
    return [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)).float()
        for g in grads
    ]


def not_finite(x: Tensor) -> Tensor:
    """Two kernels where `isfinite` and a negation take five: 0 times inf or NaN is NaN.

    >>> not_finite(torch.tensor([1.0, float("inf"), float("nan")]))
    tensor([False,  True,  True])
    """
    return (x * 0).ne(0)


def kind_of(g: Tensor) -> str:
    """ "nan", "inf", or "" for a finite gradient.

    >>> kind_of(torch.tensor([1.0, float("inf")]))
    'inf'
    """
    g = dense(g)
    if torch.isnan(g).any():
        return "nan"
    return "inf" if torch.isinf(g).any() else ""

"""One look at the scaled gradients, on every device: finite? how large? which norm?

MXNet's own ops need care. `multi_all_finite` takes one dtype a call; `multi_sum_sq` squares float16
in float16, which is infinite from 256 on, and adds up one element after the other: 1.6 % are
missing at 10 million. A dot product of pieces is right to 1e-5. A CPU's arrays are read by NumPy,
which is several times as fast at a maximum, the copy included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import nd

from ..core import Culprit
from ..formats import FP32
from ..reading import Reading

_FEW = 2**13  # elements: up to here a sum one by one loses nothing that matters
_PIECE = 2**18  # elements: a float32 dot product of more loses digits
_TINY = 1e-20  # a sum of squares below it may have lost some to float32's underflow


class Gradient(NamedTuple):
    """One parameter's gradient on one device."""

    name: str
    data: Any
    """The parameter's own array, which knows whether backward has reached it."""
    grad: Any

    @property
    def elements(self) -> Any:
        """What to look at: a sparse gradient's rows, None if there is nothing."""
        grad = self.grad
        if grad.stype == "row_sparse":
            return grad.data if grad.indices.shape[0] else None
        if grad.size == 0:
            return None
        return grad.as_nd_ndarray() if hasattr(grad, "as_nd_ndarray") else grad


class Size(NamedTuple):
    """How large one gradient is."""

    squares: float
    """Sum of squares; inf or NaN if, and only if, an element is."""
    peak: float
    """Largest absolute value, NaN where it was not taken."""


class GluonLook(NamedTuple):
    """What the gradients showed."""

    reading: Reading
    """Its norm is of the gradients times the factor, the largest of all devices."""
    culprits: tuple[Culprit, ...] = ()
    devices: tuple[str, ...] = ()
    """Where something was not finite, if not everywhere."""


def look(gradients: Sequence[Gradient], factor: float, *, amax: bool) -> GluonLook:
    """Looks at what will be used: gradients that leave float32 when multiplied by `factor`, the
    inverse of the scale, are not finite. The factor is negative where a loss is maximized.

    >>> weight, grad = nd.ones(2), nd.array([3, -4], dtype="float16")
    >>> look([Gradient("weight", weight, grad)], 0.5, amax=True).reading[:2]
    (False, 4.0)
    """
    factor = abs(factor)
    devices: dict[Any, list[tuple[Gradient, Any]]] = {}
    for g in gradients:
        elements = g.elements
        if elements is not None:
            devices.setdefault(g.grad.context, []).append((g, elements))
    peak, norm, bad = 0.0, 0.0, []
    for held in devices.values():
        sizes = _sizes([elements for _, elements in held], amax)
        for (g, elements), size in zip(held, sizes, strict=True):
            if not math.isfinite(size.squares) or _leaves_float32(elements, size, factor):
                bad.append((g, elements))
            elif amax:
                peak = max(peak, size.peak)
        norm = max(norm, math.sqrt(math.fsum(s.squares for s in sizes)) * factor if not bad else 0)
    if bad and amax:
        peak = max(peak, *(_finite_peak(elements) for _, elements in bad))
    reading = Reading(
        nonfinite=bool(bad),
        amax=peak if amax else math.inf,
        checked=bool(gradients),
        norm=math.nan if bad else norm,
    )
    where = dict.fromkeys(str(g.grad.context) for g, _ in bad)
    return GluonLook(reading, _culprits(bad), tuple(where) if len(where) < len(devices) else ())


def _leaves_float32(elements: Any, size: Size, factor: float) -> bool:
    """Does a finite gradient become infinite on its way to the weights?"""
    if math.sqrt(size.squares) * factor <= FP32.max:
        return False
    return _finite_peak(elements) * factor > FP32.max  # rare: only now the peak itself is needed


def _culprits(bad: Sequence[tuple[Gradient, Any]]) -> tuple[Culprit, ...]:
    """By name, in reverse order: backward reached the last parameters first."""
    kinds = {g.name: "inf" for g, _ in bad}
    for g, elements in bad:
        if np.isnan(elements.asnumpy()).any():
            kinds[g.name] = "nan"
    return tuple(Culprit(name, kind) for name, kind in reversed(kinds.items()))


def _finite_peak(elements: Any) -> float:
    v = elements.asnumpy()
    return float(np.abs(v[np.isfinite(v)]).max(initial=0))


def _sizes(arrays: list[Any], amax: bool) -> list[Size]:
    """The sizes of arrays that lie on one device."""
    if arrays[0].context.device_type.startswith("cpu"):
        return [by_numpy(a, amax) for a in arrays]
    return by_ops(arrays, amax)


def by_numpy(array: Any, amax: bool) -> Size:
    """A CPU's array: exact, and fast.

    >>> by_numpy(nd.array([2.0**-100]), amax=False).squares == 2.0**-200    # 0 in float32
    True
    """
    v = array.asnumpy().ravel()
    if v.dtype.itemsize < 4:
        v = v.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = math.fsum(
            min(float(np.dot(p, p)), math.inf)
            for p in (v[i : i + _PIECE] for i in range(0, v.size, _PIECE))
        )
        if not _TINY < squares < math.inf:
            wide = v.astype(np.float64)
            squares = float(np.dot(wide, wide))
    return Size(squares, float(max(-v.min(), v.max())) if amax else math.nan)


def by_ops(arrays: Sequence[Any], amax: bool) -> list[Size]:
    """Arrays on an accelerator: MXNet's ops there, and one wait. What looks odd is copied over.

    >>> [size.squares for size in by_ops([nd.ones(4), nd.array([3e4], dtype="float16")], amax=True)]
    [4.0, 900000000.0]
    """
    few = [i for i, a in enumerate(arrays) if a.size <= _FEW and a.dtype == np.float32]
    many = sorted(set(range(len(arrays))) - set(few))
    parts = [_dots(arrays[i]) for i in many]
    sums = [nd.multi_sum_sq(*(arrays[i] for i in few), num_arrays=len(few))] if few else []
    sums += [dot for dots in parts for dot in dots]
    if amax:
        sums += [_peak(a) for a in arrays]
    numbers = iter(nd.concat(*sums, dim=0).asnumpy().tolist())
    squares = {i: next(numbers) for i in few}
    for i, dots in zip(many, parts, strict=True):
        squares[i] = sum(next(numbers) for _ in dots)
    peaks = [next(numbers) if amax else math.nan for _ in arrays]
    return [
        Size(squares[i], peaks[i]) if _TINY < squares[i] < math.inf else by_numpy(a, amax)
        for i, a in enumerate(arrays)
    ]


def _dots(array: Any) -> list[Any]:
    """The sum of squares, in pieces."""
    flat = array.reshape(-1)
    pieces: Iterable[Any] = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
    return [nd.dot(p, p) for p in (_single(p) for p in pieces)]


def _peak(array: Any) -> Any:
    return _single(nd.maximum(nd.max(array), -nd.min(array)))


def _single(array: Any) -> Any:
    return array if array.dtype == np.float32 else array.astype("float32")

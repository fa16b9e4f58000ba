"""Weights before and after a sampled step: how far they moved, and which did not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 2**11  # elements that are looked at, evenly spread over a parameter
FIELDS = ("rms", "amax", "nonfinite", "update", "unchanged", "below_eps", "alike")


class WeightLook(NamedTuple):
    """A part of one optimizer's weights before its step."""

    params: list[Tensor]
    before: list[Tensor]
    moved: list[Tensor | None]
    """Where the gradient is not zero; None where there is none."""


def before(optimizer: Any) -> WeightLook:
    """To be called before the step.

    >>> w = torch.nn.Parameter(torch.ones(4))
    >>> w.grad = torch.tensor([0.0, 1.0, 1e-9, 1.0])
    >>> sgd = torch.optim.SGD([w], lr=0.5)
    >>> look = before(sgd)
    >>> sgd.step()
    >>> rows = after(sgd, look).tolist()
    >>> dict(zip(FIELDS, rows[0]))["unchanged"]
    0.3333333432674408
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    params = [p for p in params if p.is_floating_point() and p.numel() and _is_plain(p)]
    return WeightLook(params, [_part(p).clone() for p in params], [_moved(p) for p in params])


def after(optimizer: Any, look: WeightLook) -> Tensor:
    """To be called after the step: for each parameter the numbers of `FIELDS`.

    rms and amax (before the step) and update (a root mean square too) are of the part that is
    looked at; `unchanged` is the share of elements with a gradient that kept their value, NaN where
    none has a gradient; `below_eps` the share whose second moment, rooted, is below Adam's eps, NaN
    elsewhere; `alike` is 1 if all rows of a matrix are equal.
    """
    homes = list(dict.fromkeys(p.device for p in look.params))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, Tensor] = {}
    for home in homes:
        at = [i for i, p in enumerate(look.params) if p.device == home]
        found.update(zip(at, _rows(optimizer, look, at, groups)))
    return torch.stack([found[i].to(homes[0], non_blocking=True) for i in range(len(found))])


def _rows(
    optimizer: Any, look: WeightLook, at: list[int], groups: dict[int, dict[str, Any]]
) -> Tensor:
    """The rows of the parameters on one device. Their parts lie end to end in one tensor, so that
    the number of operations does not grow with the number of parameters."""
    params = [look.params[i] for i in at]
    wide = torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32
    new = _End2End([_part(p) for p in params], wide)
    old = torch.cat([look.before[i].reshape(-1).to(wide) for i in at])
    moves = [look.moved[i] for i in at]
    moved = torch.cat([_nowhere(p) if m is None else m for p, m in zip(params, moves)])
    sizes = new.sum(torch.ones_like(old))
    return torch.stack(
        (
            (new.sum(old.square()) / sizes).sqrt(),
            new.largest(old.abs()),
            _nonfinite(params),
            (new.sum((new.values - old).square()) / sizes).sqrt(),
            new.sum(((new.values == old) & moved).to(wide)) / new.sum(moved.to(wide)),
            _below_eps(optimizer, params, groups, wide),
            torch.stack([_alike(p) for p in params]),
        ),
        1,
    ).float()


class _End2End:
    """Parts of several tensors in one, with reductions of each part.

    >>> parts = _End2End([torch.ones(2), torch.full((3,), 2.0)], torch.float32)
    >>> parts.sum(parts.values).tolist(), parts.largest(parts.values).tolist()
    ([2.0, 6.0], [1.0, 2.0])
    """

    def __init__(self, parts: list[Tensor], dtype: torch.dtype) -> None:
        self.values = torch.cat([part.to(dtype) for part in parts])
        sizes = torch.tensor([part.numel() for part in parts])
        self.of = torch.repeat_interleave(sizes).to(self.values.device, non_blocking=True)
        self._zeros = self.values.new_zeros(len(parts))

    def sum(self, values: Tensor) -> Tensor:
        return self._zeros.index_add(0, self.of, values)

    def largest(self, values: Tensor) -> Tensor:
        return self._zeros.scatter_reduce(0, self.of, values, "amax")


def _nonfinite(params: list[Tensor]) -> Tensor:
    """How many elements of each whole parameter are not finite. On the CPU, where reading a number
    costs nothing, they are counted only where there are any."""
    sums = torch.stack([p.detach().sum().float() for p in params])
    if sums.device.type == "cpu" and bool(torch.isfinite(sums).all()):
        return torch.zeros_like(sums)
    return torch.stack([p.numel() - torch.isfinite(p.detach()).sum() for p in params])


def _nowhere(p: Tensor) -> Tensor:
    return torch.zeros_like(_part(p), dtype=torch.bool)


def fingerprint(params: list[Tensor]) -> dict[str, float]:
    """The size of all weights and of all gradients, for a comparison with those of other ranks.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> w.grad = torch.tensor([0.0, 2.0])
    >>> fingerprint([w])
    {'weights': 5.0, 'gradients': 2.0}
    """
    grads = [p.grad for p in params if p.grad is not None]
    return {
        "weights": _size([p.detach() for p in params]),
        "gradients": _size(grads),
    }


def _size(given: list[Tensor]) -> float:
    """The norm of those that can be read here; NaN if there is one that cannot."""
    if not given or not all(_is_plain(t) for t in given):
        return math.nan
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in given]
    return float(torch.stack([n.to(norms[0].device) for n in norms]).norm())


def _below_eps(
    optimizer: Any, params: list[Tensor], groups: dict[int, dict[str, Any]], wide: torch.dtype
) -> Tensor:
    """The share of each parameter's second moments whose root is below eps; NaN where there are
    none, or only zeros, as in a sparse embedding's other rows."""
    shares = torch.full((len(params),), math.nan, dtype=wide, device=params[0].device)
    known, parts, corrections, limits = [], [], [], []
    for i, p in enumerate(params):
        state, group = optimizer.state.get(p) or {}, groups[id(p)]
        second = next((state[name] for name in _second(group) if name in state), None)
        eps = group.get("eps", 0)
        if not isinstance(second, Tensor) or not second.numel() or not _is_plain(second):
            continue
        if not isinstance(eps, (int, float)):  # a pair, such as Adafactor's
            continue
        steps = float(state.get("step", 1)) if p.device.type == "cpu" else 1e9
        beta = float(group["betas"][1]) if "betas" in group else 0.0
        known.append(i)
        parts.append(_part(second))
        corrections.append(1 - beta ** max(1.0, steps))
        limits.append(float(eps))
    if not known:
        return shares
    moments = _End2End(parts, wide)
    factors, below = (torch.tensor(x, dtype=wide).to(shares.device) for x in (corrections, limits))
    some = moments.values > 0
    low = some & ((moments.values / factors[moments.of]).sqrt() < below[moments.of])
    found = moments.sum(low.to(wide)) / moments.sum(some.to(wide))
    return shares.index_copy(0, torch.tensor(known, device=shares.device), found)


def _second(group: dict[str, Any]) -> tuple[str, ...]:
    """What an optimizer calls the moment whose root it adds eps to: Adam; RMSprop; Adagrad.
    (Adadelta, which has a rho, adds its eps to the moment.)"""
    return ("exp_avg_sq",) if "rho" in group else ("exp_avg_sq", "square_avg", "sum")


def _alike(p: Tensor) -> Tensor:
    if p.dim() < 2 or len(p) < 2:
        return torch.zeros((), device=p.device)
    rows = p.detach()[:64]
    return (rows == rows[:1]).all().float()


def _is_plain(t: Tensor) -> bool:
    """Not sharded, sparse or quantised: its elements can be compared here."""
    return type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided


def _moved(p: Tensor) -> Tensor | None:
    g = p.grad
    if g is None or not _is_plain(g) or g.shape != p.shape:
        return None
    return _part(g) != 0


def _part(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _MOST)]

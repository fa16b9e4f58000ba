"""Weights before and after a sampled step: how far they moved, and which did not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 2**13  # elements that are looked at, evenly spread over a parameter
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
    rows = []
    for p, old, moved in zip(look.params, look.before, look.moved):
        new = _part(p)
        wide = new.float()
        step = wide - old.float()
        lost = moved.logical_and(new == old) if moved is not None else None
        unchanged = (
            wide.new_full((), torch.nan) if moved is None else lost.sum() / moved.sum()  # type: ignore[union-attr]
        )
        rows.append(
            torch.stack(
                (
                    old.float().square().mean().sqrt(),
                    old.float().abs().amax(),
                    (p.numel() - torch.isfinite(p).sum()).float(),
                    step.square().mean().sqrt(),
                    unchanged.float(),
                    _below_eps(optimizer, p),
                    _alike(p),
                )
            )
        )
    home = rows[0].device
    return torch.stack([row.to(home, non_blocking=True) for row in rows])


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


def _below_eps(optimizer: Any, p: Tensor) -> Tensor:
    state = optimizer.state.get(p) or {}
    second = state.get("exp_avg_sq")
    if not isinstance(second, Tensor) or not second.numel() or not _is_plain(second):
        return p.new_full((), torch.nan, dtype=torch.float32)
    group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
    part = _part(second).float()
    part = part[part > 0]  # a sparse embedding's other rows have none
    if not part.numel():
        return p.new_full((), torch.nan, dtype=torch.float32)
    steps = float(state.get("step", 1)) if p.device.type == "cpu" else 1e9
    beta = group["betas"][1] if "betas" in group else 0.0
    corrected = part / (1 - float(beta) ** max(1.0, steps))
    return (corrected.sqrt() < float(group.get("eps", 0))).float().mean()


def _alike(p: Tensor) -> Tensor:
    if p.dim() < 2 or len(p) < 2:
        return p.new_zeros((), dtype=torch.float32)
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

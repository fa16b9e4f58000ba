"""What a loss's graph shows about the parameters below it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_FULL = ("Embedding", "Norm")  # operations that give their parameters' gradients in float32


def leaves(loss: Tensor) -> list[Tensor]:
    """The parameters below a loss."""
    return list({id(p): p for p, _ in _edges(loss)}.values())


def never_half(loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters below a loss whose gradients are made in full precision, and all others.

    An embedding or a norm under autocast is used in float32: however large its gradient, it cannot
    overflow float16. Everything else may have been cast on the way, or inside a custom function.

    >>> linear, norm = torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2, bias=False)
    >>> with torch.autocast("cpu", torch.float16):
    ...     loss = linear(norm(torch.ones(1, 2))).float().sum()
    >>> full, rest = never_half(loss)
    >>> full[0] is norm.weight, rest[0] is linear.weight
    (True, True)
    """
    params, half = {}, set()
    for p, node in _edges(loss):
        params[id(p)] = p
        known = any(word in node.name() for word in _FULL) and "WeightNorm" not in node.name()
        if not known or any(m.dtype is not torch.float32 for m in node._input_metadata):
            half.add(id(p))
    rest = [p for key, p in params.items() if key in half]
    return [p for key, p in params.items() if key not in half], rest


class FullPrecision:
    """The parameters of a run whose gradients never were float16: no part of amax."""

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[Tensor]] = {}

    def learn(self, loss: Tensor) -> None:
        """From the graph of a loss; one use in float16 is enough to count."""
        full, rest = never_half(loss)
        if rest:  # else nothing is float16, as far as one can see
            self.known.update({id(p): weakref.ref(p) for p in full})
        for p in rest:
            self.known.pop(id(p), None)

    def positions(self, params: list[Tensor]) -> set[int]:
        """Of those among `params`; none if that would leave nothing."""
        known = self.known
        if not known:
            return set()
        full = {i for i, p in enumerate(params) if id(p) in known and known[id(p)]() is p}
        return full if len(full) < len(params) else set()


def _edges(loss: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Each parameter with each node of the graph that hands it a gradient."""
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for behind, _ in node.next_functions:
            p = getattr(behind, "variable", None)
            if p is None:
                stack.append(behind)
            else:
                yield p, node

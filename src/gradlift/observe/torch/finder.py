"""Finds the first operation whose result is not finite although its inputs were."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...torch.nested import tensors
from ..places import Places

_MAKES_INF = {  # on purpose, such as a mask
    *("full", "full_like", "fill", "fill_", "new_full", "masked_fill", "masked_fill_", "where"),
    *("scalar_tensor", "copy_", "clone", "detach", "lift_fresh", "constant_pad_nd"),
    *("cat", "stack", "index_put_"),
    *("_local_scalar_dense", "isinf", "isnan", "_amp_foreach_non_finite_check_and_unscale_"),
}
_NOT_WRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_NOT_NEGATIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")
_AT_ZERO = (*_NOT_NEGATIVE[:3], "rsqrt", "reciprocal", "xlogy", "linalg_vector_norm")
_SUSPECTS = ("div", *_NOT_NEGATIVE, "reciprocal", "xlogy", "acos", "asin", "atanh", "std", "var")
_SAVED = ("self", "other")
_MOST_ENDS = 8  # operations between a loss and the last module: few, and looked at in every step
_NOT_FINITE_AT: dict[str, tuple[str, Any, str]] = {
    "SqrtBackward0": ("result", lambda x: (x == 0).any(), "0 in the input"),
    "AcosBackward0": ("self", lambda x: (x.abs() == 1).any(), "1 or -1 in the input"),
    "AsinBackward0": ("self", lambda x: (x.abs() == 1).any(), "1 or -1 in the input"),
}
"""By node: what it saves, the test for the bad point, and that point in words."""
_MOST_NODES = 500
NOTHING = "0 in the divisor, and 0 is what is divided"
_FILE = re.compile(r'File "(.+)", line (\d+)')


class Origin(NamedTuple):
    """An operation that made numbers inf or NaN, or an input that held them."""

    found: str
    """"nan" or "inf"."""
    where: str
    """"forward", "backward", "input" or "buffer"."""
    module: str = ""
    op: str = ""
    place: str = ""
    input: str = ""
    dtype: str = ""
    before: str = ""
    """The line of backward(), where the line itself is not known."""


class Finder(TorchDispatchMode):
    """Looks at the result of every operation while it is entered.

    >>> finder = Finder(Places())
    >>> with finder:
    ...     _ = torch.tensor([1.0, 0.0]).log() * 0
    >>> finder.origin().op, finder.origin().input
    ('log', '0 in the input')
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.modules: list[nn.Module] = []
        """Those that are being called, the innermost last."""
        self.names: dict[nn.Module, str] = {}
        self.inf: Origin | None = None
        self.nan: Origin | None = None
        self.nan_of_inf = False
        self.paused = 0

    def origin(self) -> Origin | None:
        """Where it began: a NaN made of an inf began with the inf, if an operation made that."""
        if self.nan is None or (self.nan_of_inf and self.inf is not None):
            return self.inf
        return self.nan

    def from_outside(self) -> bool:
        """Was the inf that the NaN is made of given to the first operation, and no mask?"""
        made = self.nan is not None and self.nan_of_inf and self.inf is None
        return made and self.nan is not None and "a row of -inf" not in self.nan.input

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        before = _level((args, kwargs)) if func._schema.is_mutable and self.nan is None else None
        out = func(*args, **kwargs)
        if self.nan is None:
            level = _level(out)
            if level and (before is None or level > before):
                self._note(func, args, kwargs, level, before)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, level: int, before: int | None) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _NOT_WRITTEN:  # whatever was in that memory
            return
        given = _level((args, kwargs)) if before is None else before
        if level <= given or (level == 1 and (name in _MAKES_INF or self.inf is not None)):
            return
        backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if backward else None
        place = self._traced(node) if backward else self.places.of(sys._getframe(2))
        module = self.modules[-1] if self.modules and not backward else None
        out = next((t for t in tensors((args, kwargs)) if t.is_floating_point()), None)
        origin = Origin(
            "nan" if level == 2 else "inf",
            "backward" if backward else "forward",
            "" if module is None else self.names.get(module, type(module).__name__),
            node.name() if node is not None else name,
            place,
            described(name, args, kwargs),
            "" if out is None else str(out.dtype).removeprefix("torch."),
        )
        if level == 2:
            self.nan, self.nan_of_inf = origin, given == 1
        else:
            self.inf = origin

    def _traced(self, node: Any) -> str:
        """The line of the script that made a node of the graph, where anomaly mode has noted it."""
        lines = (node.metadata.get("traceback_") or []) if node is not None else []
        for line in reversed(lines):
            match = _FILE.search(line)
            if match:
                shown = self.places.place(match[1], int(match[2]))
                if shown is not None:
                    return shown
        return ""


class End(NamedTuple):
    """An operation near the end of a loss whose derivative is not finite at one point."""

    name: str
    """Of its node in the graph."""
    value: Tensor
    """What the node has saved; the graph itself is freed by the backward pass."""


def loss_end(losses: list[Tensor]) -> list[End]:
    """Such operations among the last of a loss, before its backward pass.

    >>> w = torch.zeros(2, requires_grad=True)
    >>> [end.name for end in loss_end([w.square().sum().sqrt() + 1])]
    ['SqrtBackward0']
    """
    found: list[End] = []
    nodes: list[Any] = [t.grad_fn for t in losses if t.grad_fn is not None]
    for _ in range(_MOST_ENDS):
        if not nodes:
            break
        node = nodes.pop(0)
        point = _NOT_FINITE_AT.get(type(node).__name__)
        if point is not None and (value := saved(node, point[0])) is not None:
            found.append(End(type(node).__name__, value))
        nodes.extend(n for n, _ in node.next_functions if n is not None)
    return found


def at_a_bad_point(ends: list[End]) -> Origin | None:
    """The operation that was given the point at which its derivative is not finite."""
    for name, value in ends:
        if bool(_NOT_FINITE_AT[name][1](value)):
            dtype = str(value.dtype).removeprefix("torch.")
            return Origin("nan", "backward", "", name, "", _NOT_FINITE_AT[name][2], dtype)
    return None


def in_graph(losses: list[Tensor], places: Places) -> Origin | None:
    """The operation that made a loss inf or NaN, from the tensors that its graph has saved.

    >>> loss = torch.ones(2, requires_grad=True).sum() / torch.zeros(())
    >>> in_graph([loss], Places()).input
    '0 in the divisor'
    """
    origin: Origin | None = None
    found = "nan" if _level(losses) == 2 else "inf"
    for node in nodes_of(losses):
        name = node.name().removesuffix("0").removesuffix("Backward")
        op = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        given = [t for t in map(functools.partial(saved, node), _SAVED) if t is not None]
        if given and op in _SUSPECTS and not _level(given[:1]):
            text = described(op, given, {})
            if found == "nan" and op == "div" and _is_count(node, given):
                text = NOTHING
            if text and "largest" not in text:
                dtype = str(given[0].dtype).removeprefix("torch.")
                line = places.of(sys._getframe(1))
                origin = Origin(found, "forward", "", op, "", text, dtype, line)
    return origin


def _is_count(node: Any, given: list[Tensor]) -> bool:
    """Is a single number divided by a zero that no gradient goes through? NaN is then 0 / 0."""
    out = getattr(node, "_input_metadata", None) or []
    single = len(out) == 1 and not out[0].shape and given[-1].dim() == 0
    return single and len(given) == 1 and not bool(given[0])


def nodes_of(losses: list[Tensor]) -> Iterator[Any]:
    """The nodes of a graph, the last operations first."""
    seen: set[Any] = set()
    nodes: list[Any] = [t.grad_fn for t in losses]
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(n for n, _ in node.next_functions)


def saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node keeps for its backward pass; None if hooks would have to bring it back.
    A checkpoint's hook runs a part of the forward pass again, which moves buffers."""
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or getattr(raw, "unpack_hook", raw) is not None:
            return None
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # freed
        return None
    return value if isinstance(value, Tensor) else None


def described(name: str, args: Any, kwargs: Any) -> str:
    """What is remarkable about the inputs of an operation, in a few words."""
    every = [t.detach() for t in tensors((args, kwargs))]
    if every and not any(t.numel() for t in every):
        return "no elements"
    if name == "div" and bool((every[-1] == 0).any()):
        nothing = len(every) > 1 and all(t.dim() == 0 and float(t) == 0 for t in every[-2:])
        return NOTHING if nothing else "0 in the divisor"
    given = [t for t in every if t.is_floating_point() and t.numel()]
    if not given:
        return ""
    first = given[0]
    if name in _AT_ZERO and bool((first == 0).any()):
        return "0 in the input"
    elif "softmax" in name and bool((first == -math.inf).flatten(0, -2).all(-1).any()):
        return "a row of -inf in the input"
    elif name in ("std", "var", "std_mean", "var_mean") and first.numel() == 1:
        return "a single element in the input"
    if name in _NOT_NEGATIVE and float(first.min()) < 0:
        return f"{float(first.min()):.4g} in the input"
    if name in ("acos", "asin", "atanh"):
        return f"{float(first.abs().max()):.7g} in the input"
    finite = first[torch.isfinite(first)]
    top = float(finite.abs().max()) if finite.numel() else math.nan
    return f"largest input {top:.4g}"


def _level(value: Any) -> int:
    """0 if all numbers are finite, 1 if some are inf and none NaN, else 2."""
    worst = 0
    for t in tensors(value):
        if not t.is_floating_point() or not t.numel() or t.layout is not torch.strided:
            continue
        if not bool(torch.isfinite(t).all()):
            if bool(torch.isnan(t).any()):
                return 2
            worst = 1
    return worst

"""The border of a block: gradients are multiplied on their way in and divided on their way out.

Inside a block gradients flow at `lift` times the scale, outside at the scale. Three kinds of
tensor cross the border, and each is multiplied in float32, by a power of two:

    output y of the block     gradient x lift         before it enters
    input x of the block      gradient x 1 / lift     where it leaves
    weight p of the block     gradient x 1 / lift     before it is added to others

So whatever is outside (a second block with the same weight, DDP's reducer, a skip connection)
sees plain gradients, and needs to know nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MisuseError

if TYPE_CHECKING:
    from ._sight import Sight

Look = Callable[[Tensor], None] | None
Border = tuple["Crossing", bool]
"""Which call of a block; is it the side where gradients come in?"""
_TAG = "_gradlift_half"


class _Factor(torch.autograd.Function):
    """x, of another dtype if need be; gradient x factor.

    An output shares memory and version with x but is no view of it, so it may be written to, and
    what others saved of x is still found to be changed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        factor: float,
        before: Look,
        after: Look,
        border: Border,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.border = border
        ctx.factor, ctx.dtype, ctx.looks = factor, x.dtype, (before, after)
        return x.detach() if dtype is x.dtype else x.to(dtype)

    # Differentiated twice, the factors cancel in one half of the graph only: better to refuse.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * 6
        before, after = ctx.looks
        if before is not None:
            before(g)
        out = g
        if ctx.factor != 1:
            narrow = g.dtype in (torch.float16, torch.bfloat16)
            out = (g.float() if narrow else g) * ctx.factor
        out = out.to(ctx.dtype)
        if after is not None:
            after(out)
        return out, None, None, None, None, None


class _Written(torch.autograd.Function):
    """x, after the block has written to what it was given for x: x's past is the block's now."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, factor: float, border: Border) -> Tensor:
        ctx.factor, ctx.dtype, ctx.border = factor, inner.dtype, border
        ctx.mark_dirty(x)
        if x.dtype is not inner.dtype:  # else they share memory
            x.copy_(inner)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, (g * ctx.factor).to(ctx.dtype), None, None


class Crossing:
    """One call of a block: what went in, with which lift. `look` is None unless it is sampled."""

    def __init__(self, name: str, lift: float, look: Sight | None = None) -> None:
        self.name, self.lift, self.look = name, lift, look
        self.wrote = False
        """Has it written to an input? Then autograd may hide where its gradients come in."""
        self.entered: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.inner: dict[int, Tensor] = {}
        self.left: dict[int, tuple[Tensor, Tensor]] = {}
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, x: Tensor) -> Tensor:
        """The block's input, as the block sees it."""
        if not x.requires_grad:
            return x
        if id(x) not in self.entered:  # the same tensor twice stays the same tensor
            dtype = torch.float16 if is_widened(x) else x.dtype
            look = None
            if self.look is not None and dtype is torch.float16:
                self.look.half, look = True, self.look.within
            inside = _Factor.apply(x, dtype, 1 / self.lift, look, None, (self, False))
            self.entered[id(x)] = (x, inside, inside._version)
            self.inner[id(inside)] = x
        return self.entered[id(x)][1]

    def leave(self, y: Tensor) -> Tensor:
        """The block's output, as everybody else sees it: never in float16.

        There the gradient still has the plain scale, which float16 might not hold.
        """
        if id(y) in self.inner:  # an input that is handed through
            return self.inner[id(y)]
        if not y.requires_grad:
            return y
        if id(y) not in self.left:
            half = y.dtype is torch.float16
            dtype = torch.float32 if half else y.dtype
            before, after = (self.look.arrived, self.look.output) if self.look else (None, None)
            outside = _Factor.apply(y, dtype, self.lift, before, after, (self, True))
            if half and self.look is not None:
                self.look.half = True
            if half:
                setattr(outside, _TAG, outside._version)
            self.left[id(y)] = (y, outside)
        return self.left[id(y)][1]

    def write_back(self) -> None:
        """If the block has written to an input, so it must be for those outside."""
        for x, inside, version in self.entered.values():
            if inside._version == version:
                continue
            self.wrote = True
            shared = x.dtype is inside.dtype  # then nothing is written now, and nothing spoilt
            keep = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
            with keep(x) if shared else contextlib.nullcontext():
                _Written.apply(x, inside, self.lift, (self, True))

    def looking(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the block's own modules are looked at too, if it is sampled."""
        return contextlib.nullcontext() if self.look is None else self.look.inside(module)

    @contextlib.contextmanager
    def weights_of(self, module: nn.Module) -> Iterator[None]:
        """Inside, every weight of the module gives its gradient back with the lift taken out."""
        if self.lift == 1 and self.look is None:
            yield
            return
        mine = {id(w) for _, w in self.weights.values()}
        swap = {}
        for p in module.parameters():
            if p.requires_grad and id(p) not in mine:
                if id(p) not in self.weights:
                    self.weights[id(p)] = (p, self._weight(p))
                swap[id(p)] = self.weights[id(p)][1]
        with swapped(module, swap):
            yield

    def _weight(self, p: Tensor) -> Tensor:
        if p.dtype is torch.float16:
            raise MisuseError(HALF_LEAF.format(f"a weight of shape {tuple(p.shape)}"))
        look = None if self.look is None else self.look.weight
        return _Factor.apply(p, p.dtype, 1 / self.lift, look, None, (self, False))


def check_borders(loss: Tensor) -> None:
    """MisuseError if a gradient gets into a block other than through what the block returned.

    Seen from the loss, whatever leaves a block backwards must have come in by the same call.
    """
    seen: set[tuple[Any, Any]] = set()
    stack: list[tuple[Any, Crossing | None]] = [(loss.grad_fn, None)]
    while stack:
        node, inside = stack.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        border = getattr(node, "border", None)
        if border is not None:
            crossing, entering = border
            if not (entering or inside is crossing or crossing.wrote):
                raise MisuseError(
                    f"a tensor made inside block {crossing.name!r} is used outside of it, and is "
                    "not what the block returned (kept in a list, caught by a hook, left on an "
                    "object): its gradient would lack the block's lift. Let the block return it, "
                    "keep it detached, or choose other blocks"
                )
            inside = crossing if entering else None
        stack.extend((n, inside) for n, _ in node.next_functions)


HALF_LEAF = (
    "{} is a float16 parameter: its gradient is float16 where the lift is taken out of it, and "
    "would be lost there. Keep the model in float32 and use torch.autocast"
)


@contextlib.contextmanager
def swapped(module: nn.Module, swap: dict[int, Tensor]) -> Iterator[None]:
    """Inside, these tensors stand in for the module's parameters (by id)."""
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []
    try:
        for m in module.modules():
            for name, p in m._parameters.items():
                if id(p) in swap:
                    undo.append((m._parameters, name, p, swap[id(p)]))
            if isinstance(m, nn.RNNBase):  # has lists of its own, and makes new ones if they differ
                weights = [swap.get(id(w), w) for w in m._flat_weights]
                known = [w if w is None else weakref.ref(w) for w in weights]
                undo.append((m.__dict__, "_flat_weights", m._flat_weights, weights))
                if "_flat_weight_refs" in m.__dict__:
                    undo.append((m.__dict__, "_flat_weight_refs", m._flat_weight_refs, known))
        for home, name, _, other in undo:
            home[name] = other
        yield
    finally:
        for home, name, p, other in undo:
            if home.get(name) is other:
                home[name] = p


def is_widened(x: Tensor) -> bool:
    """Is it a block's float16 output in float32, unchanged since?"""
    return getattr(x, _TAG, None) == x._version


def widened(y: Tensor) -> Tensor:
    """A float16 output in float32, where no gradient is recorded."""
    return y.float() if y.dtype is torch.float16 else y


def mapped(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """f of every tensor in nested tuples, lists, dicts and dataclasses; the rest as it is.

    >>> mapped({"a": (torch.ones(1), 2)}, lambda t: t + 1)
    {'a': (tensor([2.]), 2)}
    """
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, dict):
        new = {k: mapped(v, f) for k, v in value.items()}
        if all(new[k] is v for k, v in value.items()):
            return value
        same = copy.copy(value)  # keeps the type, and what a subclass has besides
        for k, v in new.items():
            same[k] = v
        return same
    if isinstance(value, (list, tuple)):
        items = [mapped(v, f) for v in value]
        if all(a is b for a, b in zip(items, value)):
            return value
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f_.name: getattr(value, f_.name) for f_ in dataclasses.fields(value)}
        changed = {k: mapped(v, f) for k, v in fields.items()}
        if all(changed[k] is v for k, v in fields.items()):
            return value
        other = copy.copy(value)
        for k, v in changed.items():
            object.__setattr__(other, k, v)
        return other
    return value

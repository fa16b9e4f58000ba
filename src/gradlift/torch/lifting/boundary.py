"""The boundary of a block: gradients are multiplied on the way in and divided on the way out.

Inside a block gradients flow at `lift` times the scale, outside at the scale. Three kinds of
tensor cross it, and each is multiplied in float32, by a power of two:

    output y of the block     gradient x lift         before it enters
    input x of the block      gradient x 1 / lift     where it leaves
    weight p of the block     gradient x 1 / lift     before it is added to others

So whatever is outside (a second block with the same weight, DDP's reducer, a skip connection)
gets plain gradients, and needs no change.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import MisuseError

if TYPE_CHECKING:
    from .lifts import BlockObserver

Observe = Callable[[Tensor], None] | None
Side = tuple["BlockCall", bool]
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
        before: Observe,
        after: Observe,
        side: Side,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.side, ctx.factor, ctx.dtype = side, factor, x.dtype
        ctx.observe = before, after
        return x.detach() if dtype is x.dtype else x.to(dtype)

    # Differentiated twice, the factors cancel in one half of the graph only: better to refuse.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * 6
        before, after = ctx.observe
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
    def forward(ctx: Any, x: Tensor, inner: Tensor, factor: float, side: Side) -> Tensor:
        ctx.factor, ctx.dtype, ctx.side = factor, inner.dtype, side
        ctx.mark_dirty(x)
        if x.dtype is not inner.dtype:  # else they share memory
            x.copy_(inner)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, (g * ctx.factor).to(ctx.dtype), None, None


class BlockCall:
    """One call of a block: what went in, with which lift; with an observer if it is sampled."""

    def __init__(self, name: str, lift: float, observer: BlockObserver | None = None) -> None:
        self.name, self.lift, self.observer = name, lift, observer
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
            observe = None
            if self.observer is not None and dtype is torch.float16:
                self.observer.half, observe = True, self.observer.within
            inside = _Factor.apply(x, dtype, 1 / self.lift, observe, None, (self, False))
            self.entered[id(x)] = (x, inside, inside._version)
            self.inner[id(inside)] = x
        return self.entered[id(x)][1]

    def leave(self, y: Tensor) -> Tensor:
        """The block's output, as it is outside: never in float16.

        There the gradient still has the plain scale, which float16 might not hold.
        """
        if id(y) in self.inner:  # an input that is handed through
            return self.inner[id(y)]
        if not y.requires_grad:
            return y
        if id(y) not in self.left:
            half, seen = y.dtype is torch.float16, self.observer
            dtype = torch.float32 if half else y.dtype
            before, after = (seen.arrived, seen.output) if seen else (None, None)
            outside = _Factor.apply(y, dtype, self.lift, before, after, (self, True))
            if half:
                setattr(outside, _TAG, outside._version)
                if seen is not None:
                    seen.half = True
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

    def observed(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the block's own modules are looked at too, if it is sampled."""
        return contextlib.nullcontext() if self.observer is None else self.observer.inside(module)

    @contextlib.contextmanager
    def weights_of(self, module: nn.Module) -> Iterator[None]:
        """Inside, every weight of the module gives its gradient back with the lift taken out."""
        if self.lift == 1 and self.observer is None:
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
        observe = None if self.observer is None else self.observer.weight
        return _Factor.apply(p, p.dtype, 1 / self.lift, observe, None, (self, False))


def check_boundaries(loss: Tensor) -> None:
    """MisuseError if a gradient gets into a block other than through what the block returned.

    Seen from the loss, whatever leaves a block backwards must have come in by the same call.
    """
    seen: set[tuple[Any, Any]] = set()
    stack: list[tuple[Any, BlockCall | None]] = [(loss.grad_fn, None)]
    while stack:
        node, inside = stack.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        side = getattr(node, "side", None)
        if side is not None:
            call, entering = side
            if not (entering or inside is call or call.wrote):
                raise MisuseError(
                    f"a tensor made inside block {call.name!r} is used outside of it, and is "
                    "not what the block returned (kept in a list, caught by a hook, left on an "
                    "object): its gradient would lack the block's lift. Let the block return it, "
                    "keep it detached, or choose other blocks"
                )
            inside = call if entering else None
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

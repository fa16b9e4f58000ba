"""What a sampled pass shows of a block: peaks of its float16 gradients, and what arrived at it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..reading import NAN
from ._inspect import dense, flat
from ._levels import Seen
from ._probe import SAMPLED, largest, peak_of, tensors
from ._statistics import describe

if TYPE_CHECKING:
    from ._layerwise import Layerwise


@dataclass
class Record:
    """One block in the window so far; peaks are numbers, or tensors on a device."""

    lift: float
    inner: Any = NAN
    """NAN, or below 0 on a device, if no float16 gradient was found in it."""
    border: Any = NAN
    part: Tensor | None = None
    """Some elements of the gradient at its output, with its lift."""
    elements: int = 0

    def described(self) -> dict[str, Any]:
        """Shares at its output, as lifted, and the largest float16 gradient anywhere inside."""
        assert self.part is not None
        facts = {**describe(self.part), "elements": self.elements, "lift": self.lift}
        peak = float(self.inner)
        return {**facts, "amax": peak * self.lift} if peak >= 0 else facts

    @staticmethod
    def read(
        records: dict[str, Record], scale: Any, dead: Any
    ) -> tuple[dict[str, Seen], float, bool]:
        """Records, scale and whether the loss was dead, in numbers: one transfer at the most."""
        values = [scale, dead, *(p for r in records.values() for p in (r.inner, r.border))]
        there = next((v for v in values if isinstance(v, Tensor)), None)
        if there is not None:
            # Numbers are filled in where the tensors are, as sending each would wait.
            filled = [
                v.detach().to(there.device, torch.float32)
                if isinstance(v, Tensor)
                else torch.full((), float(v), device=there.device)
                for v in values
            ]
            values = torch.stack(filled).tolist()
        pairs = zip(records, values[2::2], values[3::2])
        seen = {
            name: Seen(float(inner), 0.0 if math.isnan(border) else float(border))
            for name, inner, border in pairs
            if inner >= 0
        }
        return seen, float(values[0]), bool(values[1])


class Sight:
    """Looks at one call of a block; nothing it is shown is changed."""

    def __init__(self, owner: Layerwise, name: str, module: nn.Module, lift: float) -> None:
        self.owner, self.name, self.lift = owner, name, lift
        device = next((p.device.type for p in module.parameters()), "cpu")
        self.half = (
            torch.amp.is_autocast_available(device)
            and torch.is_autocast_enabled(device)
            and torch.get_autocast_dtype(device) is torch.float16
        )
        """Is there any float16 in the block? If not, its weights' gradients cannot have been."""

    def within(self, g: Tensor) -> None:
        """A float16 gradient inside the block."""
        self._note("inner", g, 1 / self.lift)

    def arrived(self, g: Tensor) -> None:
        """A gradient at the block's output, without the lift."""
        self._note("border", g, 1.0)

    def output(self, g: Tensor) -> None:
        """The same, with the lift."""
        if g.dtype is torch.float16:
            self.within(g)
        record = self._record()
        record.part = strided(g).clone()
        record.elements = g.numel()

    def weight(self, g: Tensor) -> None:
        """A weight's gradient, with the lift: of interest only if it came in float16."""
        g = dense(g)
        if not self.half or g.numel() == 0:
            return
        part = strided(g)
        was_half = ((part.half().to(part.dtype) == part) | part.isnan()).all()
        peak = peak_of(flat(g.detach()))
        if isinstance(peak, Tensor):
            peak = torch.where(was_half, peak, -1.0)
        elif not was_half:
            return
        self._keep("inner", peak * (1 / self.lift))

    def _note(self, what: str, g: Tensor, factor: float) -> None:
        g = dense(g)
        if g.numel():
            self._keep(what, peak_of(flat(g.detach())) * factor)

    def _keep(self, what: str, peak: Any) -> None:
        record = self._record()
        setattr(record, what, largest((getattr(record, what), peak)))

    def _record(self) -> Record:
        record = self.owner.records.get(self.name)
        if record is None:
            record = self.owner.records[self.name] = Record(self.lift)
        record.lift = self.lift
        self.owner.looked = True
        return record

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Meanwhile, each module inside the block is looked at too."""
        parts = [m for m in module.modules() if m is not module]
        handles = [m.register_forward_hook(self._after) for m in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        for t in tensors(output):
            if t.dtype is torch.float16 and t.requires_grad:
                self.half = True
                hook: Callable[[Tensor], None] = self.within
                t.register_hook(hook)


def strided(g: Tensor) -> Tensor:
    """At most 2^16 of its elements, evenly spread."""
    elements = flat(dense(g).detach())
    return elements[:: max(1, -(-elements.numel() // SAMPLED))]

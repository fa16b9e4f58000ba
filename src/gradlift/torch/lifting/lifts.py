"""How large each block's gradients are, and the lifts that make them alike.

T_b   the scale that would suit block b alone: a `Headroom` rule's, fed with b's own peaks
L_b = min(T_b / min T, 2^96)     at least 1: the block with the largest gradients has none
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import SettingsError, StateError
from ...formats import FP16
from ...reading import NAN, Reading
from ...rules import Headroom, ScaleState, parse
from ...rules.base import LARGEST, SMALLEST, is_power_of_two
from ...text import shown
from ..nested import tensors
from ..probing import SAMPLED, largest, peak_of
from ..scaler.finite_check import dense, flat
from ..scaler.statistics import describe

if TYPE_CHECKING:
    from .lifting import Layerwise

MAX_LIFT = 2.0**96  # a float16 gradient divided by it is still a normal float32 number
_CLEAR = 2.0**-10  # a float16 peak below it may be a remnant of something larger
_UNSEEN = 2.0**8  # room for what could not be seen: a weight's gradient sums over a batch


class BlockPeaks(NamedTuple):
    """One block in one window, with the scale but without the lift; in numbers."""

    inner: float
    """The largest |float16 gradient| inside it; not finite if any was not."""
    outer: float
    """The largest |gradient| that arrived at its outputs, in float32: there nothing is lost."""


@dataclass
class BlockLift:
    """What is known of one block."""

    state: ScaleState
    lift: float = 1.0
    known: bool = False
    """Have its gradients been seen clearly?"""
    rough: bool = False
    """If not: is there an estimate at least?"""


def tracker(rule: Any, every: int) -> Headroom:
    """The rule that follows one block's peaks, once in `every` steps and without bounds."""
    found = parse(rule)
    if not isinstance(found, Headroom):
        raise SettingsError(
            f"rule is {str(found)!r}, expected one that follows magnitudes: 'auto', "
            "'auto:cautious' or a gradlift.rules.Headroom"
        )
    leak = min(found.leak * every, 2**20)
    return dataclasses.replace(found, min_scale=SMALLEST, max_scale=LARGEST, leak=leak)


def learn(
    rule: Headroom,
    lifts: dict[str, BlockLift],
    peaks: dict[str, BlockPeaks],
    scale: float,
    guess: bool,
) -> bool:
    """Advances each block by what one window showed, and moves the lifts; did one move far?

    `peaks` is in the order in which backward reached the blocks: of those that are not finite the
    first is the culprit. With `guess`, a block where nothing arrived gets the lift of the one
    behind it: next time its gradients will not be flushed there.
    """
    bad = [name for name, (inner, outer) in peaks.items() if not math.isfinite(inner + outer)]
    for name, (inner, outer) in peaks.items():
        block, peak = lifts[name], inner or outer
        clear = inner * block.lift >= _CLEAR
        if name in bad:
            if name != bad[0] or not math.isfinite(outer):
                continue  # it came from elsewhere
            clear, peak = False, outer
            if outer * block.lift <= FP16.max:  # grew too large inside, by how much is unknown
                used = min(max(scale * block.lift, SMALLEST), LARGEST)
                overflow = Reading(nonfinite=True, amax=math.inf)
                block.state = rule.advance(block.state._replace(scale=used), overflow)
                block.rough = True
                continue
        if not peak:
            continue
        if clear or block.known:
            start = block.state if block.known else rule.init()
            block.state, block.known = _advanced(rule, start, peak / scale), True
        else:
            block.state, block.rough = _advanced(rule, rule.init(), peak / scale * _UNSEEN), True
    return _lift(lifts, peaks, guess) or bool(bad)


def _advanced(rule: Headroom, state: ScaleState, peak: float) -> ScaleState:
    """After a gradient of this size, with neither scale nor lift."""
    return rule.advance(state, Reading(nonfinite=False, amax=peak * state.scale))


def _lift(lifts: dict[str, BlockLift], order: Iterable[str], guess: bool) -> bool:
    """Lifts from states; True if one moved by more than a bit, or had to be guessed."""
    known = [block.state.scale for block in lifts.values() if block.known or block.rough]
    if not known:
        return guess
    least, moved = min(known), False
    for block in lifts.values():
        if block.known or block.rough:
            lift = min(block.state.scale / least, MAX_LIFT)
            moved |= not 0.5 <= lift / block.lift <= 2
            block.lift = lift
    behind = 1.0
    for block in map(lifts.__getitem__, order):
        if block.known or block.rough:
            behind = block.lift
        else:
            block.lift = max(1.0, behind / _UNSEEN) if guess else 1.0
            moved |= guess
    return moved


def dump(rule: Headroom, lifts: dict[str, BlockLift]) -> dict[str, Any]:
    return {
        name: dataclasses.asdict(block) | {"state": rule.dump(block.state)}
        for name, block in lifts.items()
    }


def load(rule: Headroom, names: list[str], data: Any) -> dict[str, BlockLift]:
    """The lifts in a dict made by `dump`, for exactly these blocks, or StateError."""
    if not isinstance(data, dict):
        raise StateError(f"the blocks of a layerwise state are a dict, not {type(data).__name__}")
    if set(data) != set(names):
        odd = sorted(map(str, set(data) ^ set(names)))
        raise StateError(
            "this layerwise state has other blocks than this model (they differ in "
            f"{shown(odd[:5])}): call layerwise() with the blocks it was saved with"
        )
    lifts = {}
    for name in names:
        entry = data[name]
        if not isinstance(entry, dict) or set(entry) != {"lift", "known", "rough", "state"}:
            raise StateError(
                f"block {name!r} is {shown(entry)}, expected lift, known, rough, state"
            )
        lift, known, rough = entry["lift"], entry["known"], entry["rough"]
        number = isinstance(lift, (int, float)) and not isinstance(lift, bool)
        if not number or not 1 <= lift <= MAX_LIFT or not is_power_of_two(lift):
            raise StateError(
                f"the lift of block {name!r} is {shown(lift)}, expected a power of two from 1 to "
                "2^96"
            )
        if not isinstance(known, bool) or not isinstance(rough, bool):
            raise StateError(
                f"known and rough of block {name!r} are {shown(known)} and {shown(rough)}"
            )
        lifts[name] = BlockLift(rule.load(entry["state"]), float(lift), known, rough)
    return lifts


# What a sampled pass shows


@dataclass
class BlockRecord:
    """One block in the window so far; peaks are numbers, or tensors on a device."""

    lift: float
    inner: Any = NAN
    """NAN, or below 0 on a device, if no float16 gradient was found in it."""
    outer: Any = NAN
    part: Tensor | None = None
    """Some elements of the gradient at its output, with its lift."""
    elements: int = 0

    def described(self) -> dict[str, Any]:
        """Shares at its output, as lifted, and the largest float16 gradient anywhere inside."""
        assert self.part is not None
        facts = {**describe(self.part), "elements": self.elements, "lift": self.lift}
        peak = float(self.inner)
        return {**facts, "amax": peak * self.lift} if peak >= 0 else facts


def read_peaks(
    records: dict[str, BlockRecord], scale: Any, loss_nonfinite: Any
) -> tuple[dict[str, BlockPeaks], float, bool]:
    """The same in Python numbers: at most one transfer."""
    values = [scale, loss_nonfinite, *(x for r in records.values() for x in (r.inner, r.outer))]
    there = next((v.device for v in values if isinstance(v, Tensor)), None)
    if there is not None:
        # Numbers are filled in where the tensors are, as sending each would wait.
        filled = [
            v.detach().to(there, torch.float32)
            if isinstance(v, Tensor)
            else torch.full((), float(v), device=there)
            for v in values
        ]
        values = torch.stack(filled).tolist()
    peaks = {
        name: BlockPeaks(float(inner), 0.0 if math.isnan(outer) else float(outer))
        for name, inner, outer in zip(records, values[2::2], values[3::2])
        if inner >= 0
    }
    return peaks, float(values[0]), bool(values[1])


class BlockObserver:
    """Looks at the gradients of one call of a block, and changes none."""

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
        self._keep("inner", g, 1 / self.lift)

    def arrived(self, g: Tensor) -> None:
        """A gradient at the block's output, without the lift."""
        self._keep("outer", g, 1.0)

    def output(self, g: Tensor) -> None:
        """The same, with the lift."""
        if g.dtype is torch.float16:
            self.within(g)
        record = self._record()
        record.part, record.elements = _some(g).clone(), g.numel()

    def weight(self, g: Tensor) -> None:
        """A weight's gradient, with the lift: of interest only if it came in float16."""
        if self.half and dense(g).numel():
            part = _some(g)
            was_half = ((part.half().to(part.dtype) == part) | part.isnan()).all()
            self._keep("inner", g, 1 / self.lift, was_half)

    def _keep(self, which: str, g: Tensor, factor: float, counts: Any = True) -> None:
        g = dense(g)
        if not g.numel():
            return
        peak = peak_of(flat(g.detach()))
        if isinstance(peak, Tensor) and isinstance(counts, Tensor):
            peak = torch.where(counts, peak, -1.0)
        elif not counts:
            return
        record = self._record()
        setattr(record, which, largest((getattr(record, which), peak * factor)))

    def _record(self) -> BlockRecord:
        record = self.owner.records.setdefault(self.name, BlockRecord(self.lift))
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
                t.register_hook(self.within)


def _some(g: Tensor) -> Tensor:
    """At most 2^16 of its elements, evenly spread."""
    elements = flat(dense(g).detach())
    return elements[:: max(1, -(-elements.numel() // SAMPLED))]

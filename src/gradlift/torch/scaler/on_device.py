"""A scale whose state is 0-d tensors on an accelerator: nothing waits for a value.

Not run on a GPU yet: tested on meta and fake tensors with transfers to the host banned, and on CPU
tensors against the scale in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...core import Cause, Culprit, Finished, clip_coefficient, decide
from ...reading import Reading
from ...rules import ScaleState
from ..gradient_source import gradients_of
from ..names import culprits_by_peak, with_first
from ..ranks.agreement import CLIPS, NOT_TAKEN, Agreed, RankRow, agree, packed
from ..ranks.group import SAME
from ..ranks.sharding import value_of
from .finite_check import Inspection, device_leaves_format, device_look, not_finite
from .weights import about_weights
from .window import APPLIED, MicroBatch, Window, first_bad, shown

if TYPE_CHECKING:
    from .settings import ScalerSettings


class Transfer:
    """All scalars of a window that somebody may want to know, in one copy to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scalars: list[Any] = []
        self.host: Tensor | None = None
        self.event: Any = None
        self.numbers: list[float] = []

    def add(self, scalars: list[Any]) -> slice:
        """Where `values` will hold these."""
        start = len(self.scalars)
        self.scalars += scalars
        return slice(start, len(self.scalars))

    def start(self) -> None:
        """Begins the copy without waiting for it."""
        there = self._packed()
        if there.device.type == "cuda":
            self.host = torch.empty(there.shape, pin_memory=True)
            self.host.copy_(there, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = there.cpu()

    def values(self, where: slice) -> list[float]:
        """Waits for the copy; without one, reads the device."""
        if len(self.numbers) < len(self.scalars):
            if self.event is not None:
                self.event.synchronize()
            self.numbers = (self._packed() if self.host is None else self.host).tolist()
        return self.numbers[where]

    def _packed(self) -> Tensor:
        return packed(self.scalars, self.device)


class OnDevice:
    """Where a scale lives once a loss or a parameter is on a device; `OnHost` has the same methods.

    The tensors are made once and updated in place.
    """

    xp = torch
    late: Literal[True] = True

    def __init__(self, state: ScaleState, skipped: int, device: torch.device) -> None:
        self.device = device
        self.state = ScaleState(
            torch.full((), state.scale, dtype=torch.float32, device=device),
            *(torch.full((), int(x), dtype=torch.int32, device=device) for x in state[1:]),
        )
        self._skipped = torch.full((), skipped, dtype=torch.int32, device=device)
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self.transfer = Transfer(self.device)

    @property
    def skipped(self) -> int:
        return int(self._skipped)

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped.fill_(count)

    def numbers(self) -> ScaleState:
        # Two transfers: a count may have more digits than a float32 holds.
        counts = torch.stack(list(self.state[1:])).tolist()
        return ScaleState(self.state.scale.item(), *counts)

    def put(self, state: ScaleState) -> None:
        for held, value in zip(self.state, state):
            held.fill_(value)

    def cap(self, ceiling: float) -> None:
        self.state.scale.clamp_(max=ceiling)

    def move(self, state: ScaleState, skips: Any) -> None:
        if isinstance(skips, Tensor):
            self._skipped.add_(skips)
        for held, new in zip(self.state, state):
            if new is not held:
                held.copy_(new)

    def inverse(self) -> Any:
        return self.state.scale.reciprocal()

    # losses

    def flag(self, loss: Tensor, recorded: bool) -> tuple[Any, Any]:
        loss = value_of(loss)
        value = loss.detach().float().sum() if loss.numel() != 1 else loss.detach().reshape(())
        total = value.float().to(self.device, non_blocking=True) if recorded else 0.0
        return total, not_finite(value).to(self.device, non_blocking=True)

    def blamed(self, flags: Sequence[Any], nonfinite: Any) -> Any:
        if len(flags) < 2:
            return flags[0] if flags else False
        losses = torch.stack(list(flags))
        return losses.any() & (losses.all() | nonfinite)  # without gradients a plain False

    def level(self, flags: Sequence[Any]) -> Any:
        if not flags:
            return 0
        losses = torch.stack(list(flags)).float()
        return losses.amax() + losses.amin()

    # gradients

    def look(
        self, window: Window, full: Set[int], *, norm: bool, amax: bool, clips: bool
    ) -> Inspection:
        inverse = torch.ones_like(self.state.scale) if window.unscaled else self.inverse()
        grads = window.source.elements
        found = device_look(grads, inverse, norm=norm, amax=amax, clips=clips, full=full)
        if window.source.gathered or torch.float16 not in {g.dtype for g in grads}:
            return found
        leaves = device_leaves_format(grads, found, inverse)
        return found._replace(nonfinite=found.nonfinite | leaves)

    def look_again(self, window: Window, which: list[int]) -> Any:
        inverse = torch.ones_like(self.state.scale) if window.unscaled else self.inverse()
        each = window.source.each()
        found = device_look([each[i] for i in which], inverse, norm=False)
        window.found_again += (found._replace(order=tuple(which[i] for i in found.order)),)
        return found.nonfinite

    def agree(self, window: Window, mine: RankRow) -> Agreed:
        own, shared = self._own_and_shared_norm(window)
        mine = mine._replace(own_norm=own, shared_norm=shared, culprit=self._first_culprit(window))
        agreed = agree(mine, window.group, self.device)
        if mine.asks & CLIPS:  # a norm that leaves float32 is no norm
            bad = agreed.reading.nonfinite.logical_or(not_finite(agreed.reading.norm))
            agreed = agreed._replace(reading=agreed.reading._replace(nonfinite=bad))
        return agreed

    def _own_and_shared_norm(self, window: Window) -> tuple[Any, Any]:
        found, group = window.found, window.group
        if not window.norm_taken:
            return NOT_TAKEN if group.has_shards else 0.0, NOT_TAKEN
        if found is None or found.lengths is None:
            return 0.0, 0.0
        if group.common_weight is not None:
            weight = group.common_weight
            n = found.norm
            return (0.0, n) if weight == SAME else (n * math.sqrt(weight), 0.0)
        own = self._constant(window, "own", lambda p: max(group.weights[id(p)], 0.0) ** 0.5)
        same = self._constant(window, "same", lambda p: float(group.weights[id(p)] == SAME))
        norm = torch.linalg.vector_norm
        return norm(found.lengths * own), norm(found.lengths * same)

    def _first_culprit(self, window: Window) -> Any:
        found, group = window.found, window.group
        if found is None or found.peaks is None:
            return 0
        at = self._constant(window, "place", lambda p: 2.0 * group.position(p))
        kind = 1 + found.peaks.isnan()
        return torch.where(not_finite(found.peaks), at + kind, 0.0).amax()

    def _constant(self, window: Window, name: str, of: Callable[[Tensor], float]) -> Tensor:
        """A number for each gradient that was looked at; sent to the device once, as that waits."""
        group, params = window.group, window.source.params
        assert window.found is not None
        some = () if len(params) == len(group.params) else tuple(map(id, params))
        key = name, window.found.order, some
        if key not in group.tensors:
            values = [of(params[i]) for i in window.found.order]
            group.tensors[key] = torch.tensor(values, device=self.device)
        return group.tensors[key]

    def lacks_norm(self, window: Window) -> bool:
        asked = bool(window.source.elements) or window.group.group is not None
        return asked and not window.norm_taken

    def clip(self, window: Window, max_norm: float) -> Tensor:
        if not window.source.elements and window.group.group is None:
            return torch.zeros_like(self.state.scale)
        window.coefficient = clip_coefficient(window.norm, max_norm, torch)
        return window.norm

    # what the host is to know

    def read(self, window: Window) -> tuple[Reading, ScaleState, bool]:
        """Reading, state and whether a loss is known, in numbers: one transfer, for those who
        cannot go on without it."""
        reading = window.reading
        assert reading is not None
        if reading.checked is False:
            return reading, ScaleState(1.0), False
        seen = [reading.nonfinite, reading.amax, reading.loss_nonfinite, reading.checked]
        transfer = Transfer(self.device)
        where = transfer.add([*self.state, *seen, reading.probe_amax, window.loss_known])
        values = transfer.values(where)
        nonfinite, amax, loss_nonfinite, checked, probe, known = values[7:]
        flags = nonfinite > 0, amax, loss_nonfinite > 0, checked > 0
        state = ScaleState(values[0], *map(int, values[1:7]))
        return Reading(*flags, probe_amax=probe), state, known > 0

    def later(
        self,
        finished: Finished,
        window: Window,
        settings: ScalerSettings,
        micro: list[MicroBatch],
        dropped: list[int],
        optimizer_of: Callable[[], Any],
    ) -> Callable[[], Finished]:
        """How to read what the step came to; with everything else of this window, in one copy.

        Not the window itself is kept: it would keep all gradients alive until the result is read.
        """
        looks = [look for look in (window.found, *window.found_again) if look and look.order]
        params, group = window.source.params, window.group
        rule, transfer = settings.rule, self.transfer
        reading, state = finished.reading, self.state
        held = [state.scale.clone(), state.skips.clone(), state.left.clone()]
        seen = [reading.nonfinite, reading.loss_nonfinite, reading.checked, reading.norm]
        known_to_ranks = [window.loss_known, window.first_culprit]
        source = window.source
        out = source.out_of_range() if source.gathered else False
        out_at = transfer.add([out]) if isinstance(out, Tensor) else None
        where = transfer.add([*held, *seen, *known_to_ranks, *(m.loss_nonfinite for m in micro)])

        def read() -> Finished:
            values = transfer.values(where)
            used, skips, left, nonfinite, loss_bad, checked, norm, known, first = values[:9]
            before = rule.init()._replace(scale=used, skips=int(skips), left=int(left))
            shown = Reading(nonfinite > 0, math.inf, loss_bad > 0, checked > 0)
            cause: Cause | None = finished.cause
            if cause is None:
                _, cause = decide(shown, before, rule, loss_known=known > 0)
            blamed: tuple[Culprit, ...] = ()
            names = settings.names if shown.nonfinite else {}
            for look in looks if shown.nonfinite else ():  # a later one if the first found none
                blamed = blamed or culprits_by_peak(params, look, names)
            done = finished._replace(
                before=before,
                next_scale=used,
                reading=shown._replace(norm=math.nan if shown.nonfinite else norm),
                cause=cause,
                culprits=with_first(blamed, int(first), group, names),
                micro_batch=None if cause in APPLIED else first_bad(values[9:], dropped),
            )
            optimizer = optimizer_of()
            held = out is True or (out_at is not None and transfer.values(out_at)[0] > 0)
            if optimizer is not None and (held or cause not in APPLIED):
                done = about_weights(done, gradients_of(optimizer), settings.names)
            return done

        return read

    def ended(
        self, finished: list[Callable[[], Finished]], reading: Reading, loss: Any, lr: float
    ) -> Callable[[], Finished]:
        """How to read a window whose numbers are on their way to the host: one step later they
        have long arrived."""
        transfer, r = self.transfer, reading
        numbers = [r.amax, r.nonfinite, r.norm, loss, self.state.scale, r.probe_amax]
        where = transfer.add(numbers)
        transfer.start()

        def read() -> Finished:
            done = shown([each() for each in finished])
            amax, bad, norm, loss, next_scale, probe = transfer.values(where)
            checked = done.reading.checked
            reading = Reading(bad > 0, amax, checked=checked, norm=norm, probe_amax=probe)
            return done._replace(reading=reading, loss=loss, lr=lr, next_scale=next_scale)

        return read

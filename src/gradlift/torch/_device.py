"""The same track on an accelerator: state in persistent tensors, and nothing waits for a value.

Not run on a GPU yet: proven on meta and fake tensors with transfers to the host banned, and on CPU
tensors against the track in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reading import Reading
from ..rules import ScaleState
from ..verdict import Cause, Culprit, LaterResult, StepResult, Verdict, decide
from ._agree import NOT_TAKEN, Heard, Said, agree_on_device, packed
from ._apply import folded_step, is_fused, must_know
from ._circle import SAME, Circle
from ._gradients import multiply
from ._inspect import device_look, not_finite
from ._masters import MasterWeights
from ._names import culprits_by_peak, with_told
from ._probe import largest, tell
from ._shards import value_of
from ._track import Facts, Track
from ._window import Window


class _Copy:
    """All scalars of a window that somebody may want to know, in one transfer."""

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

    def _packed(self) -> Tensor:
        return packed(self.scalars, self.device)

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
        if len(self.numbers) < len(self.scalars):
            if self.event is not None:
                self.event.synchronize()
            self.numbers = (self._packed() if self.host is None else self.host).tolist()
        return self.numbers[where]


class DeviceTrack(Track):
    """A track whose state lives on `device`; reading a number from it is up to the caller."""

    device: torch.device
    tensors: ScaleState
    skips_seen: Tensor
    copy: _Copy

    @classmethod
    def take(cls, track: Track, device: torch.device) -> DeviceTrack:
        """Moves a track to a device; what it holds in this window comes along."""
        moved = cls.__new__(cls)
        moved.__dict__.update(track.__dict__)
        moved.device = device
        moved.tensors = ScaleState(
            torch.full((), track.state.scale, dtype=torch.float32, device=device),
            *(torch.full((), int(x), dtype=torch.int32, device=device) for x in track.state[1:]),
        )
        moved.skips_seen = torch.full((), track.skipped, dtype=torch.int32, device=device)
        moved.copy = _Copy(device)
        if track.calls:
            moved.flags = [torch.full((), bool(f), device=device) for f in track.flags]
            moved.losses = list(moved.flags)
        return moved

    def clear(self) -> None:
        super().clear()
        if "device" in self.__dict__:
            self.copy = _Copy(self.device)

    def numbers(self) -> ScaleState:
        # Two transfers: a count may have more digits than a float32 holds.
        counts = torch.stack(list(self.tensors[1:])).tolist()
        return ScaleState(self.tensors.scale.item(), *counts)

    def put(self, state: ScaleState) -> None:
        for held, value in zip(self.tensors, state):
            held.fill_(value)
        for circle in self.circles.values():
            circle.compared = False

    def factor(self, device: torch.device) -> Any:
        return self.tensors.scale.to(device, non_blocking=True)

    def inverse(self) -> Any:
        return self.tensors.scale.reciprocal()

    def note(self, loss: Tensor) -> None:
        loss = value_of(loss)
        value = loss.detach().float().sum() if loss.numel() != 1 else loss.detach().reshape(())
        if self.want_norm:  # recorded
            self.loss = self.loss + value.float().to(self.device, non_blocking=True)
        dead = not_finite(value).to(self.device, non_blocking=True)
        self.flags.append(dead)
        self.losses.append(dead)

    def dead_for_sure(self) -> bool:
        return False  # nobody knows yet

    def cap(self, ceiling: float) -> None:
        self.ceiling = ceiling
        if self.calls == 0:
            self.tensors.scale.clamp_(max=ceiling)

    def look_back(self, loss: Tensor) -> None:
        grads = self.known_gradients(loss)
        if grads:  # no need to wait for the answer
            found = device_look(grads, torch.ones_like(self.tensors.scale), norm=False).nonfinite
            self.flags[-1] = self.flags[-1].logical_or(found)

    def found(self, optimizer: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params, grads, elements = super().found(optimizer)
        if isinstance(optimizer, MasterWeights):  # one peak a parameter, so that it can be named
            elements = grads
        return params, grads, elements

    def read(self, window: Window, norm: bool) -> None:
        circle = window.circle
        takes = norm or self.want_norm or circle.asked_norm
        window.has_norm, window.loss_known = takes, self.calls > 0 and circle.everyone
        amax = self.want_amax or circle.asked_amax
        if not window.grads:
            gone = bool(self.left_out)
            dead = 2 if gone and not self.spoiled else self.dead(window)
            told = [gone, math.inf if gone else 0.0, gone and not self.spoiled, math.nan]
            bad, peak, blamed, nan = (torch.full_like(self.tensors.scale, x) for x in told)
            reading = Reading(bad > 0, peak, blamed > 0, checked=gone, norm=nan)
        else:
            dead = self.dead(window)
            window.look = found = device_look(
                window.grads,
                self.inverse(),
                norm=takes,
                amax=amax,
                clips=norm,
                full=self.positions(window),
            )
            window.norm = found.norm
            reading = Reading(
                nonfinite=found.nonfinite,
                amax=found.amax,
                loss_nonfinite=self.blamed_loss(window, found.nonfinite),
                norm=window.norm,
                probe_amax=self.probed(window),
            )
        if circle.group is not None:
            reading = self.agree(window, reading, dead, amax=amax, clips=norm)
            if norm:  # it clips: a norm that leaves float32 is no norm
                bad = reading.nonfinite.logical_or(not_finite(window.norm))
                reading = reading._replace(nonfinite=bad)
        window.reading = reading

    def ask(self, mine: Said, circle: Circle) -> Heard:
        return agree_on_device(mine, circle, self.device)

    def own_and_shared(self, window: Window) -> tuple[Any, Any]:
        found, circle = window.look, window.circle
        if not window.has_norm:
            return NOT_TAKEN if circle.has_own else 0.0, NOT_TAKEN
        if found is None or found.lengths is None:
            return 0.0, 0.0
        if circle.common is not None:
            n = found.norm
            return (0.0, n) if circle.common == SAME else (n * math.sqrt(circle.common), 0.0)
        own = self.constant(window, "own", lambda p: max(circle.weights[id(p)], 0.0) ** 0.5)
        same = self.constant(window, "same", lambda p: float(circle.weights[id(p)] == SAME))
        norm = torch.linalg.vector_norm
        return norm(found.lengths * own), norm(found.lengths * same)

    def first_bad(self, window: Window) -> Any:
        found, circle = window.look, window.circle
        if found is None or found.peaks is None:
            return 0
        at = self.constant(window, "place", lambda p: 2.0 * circle.position(p))
        kind = 1 + found.peaks.isnan()
        return torch.where(not_finite(found.peaks), at + kind, 0.0).amax()

    def constant(self, window: Window, name: str, of: Callable[[Tensor], float]) -> Tensor:
        """A number for each gradient that was looked at; sent to the device once, as that waits."""
        circle, params = window.circle, window.params
        assert window.look is not None
        some = () if len(params) == len(circle.params) else tuple(map(id, params))
        key = name, window.look.order, some
        if key not in circle.tensors:
            values = [of(params[i]) for i in window.look.order]
            circle.tensors[key] = torch.tensor(values, device=self.device)
        return circle.tensors[key]

    def probed(self, window: Window) -> Any:
        peak = super().probed(window)
        return peak.to(self.device, non_blocking=True) if isinstance(peak, Tensor) else peak

    def dead(self, window: Window) -> Any:
        if window.circle.group is None or not window.circle.everyone or not self.flags:
            return 0
        losses = torch.stack(self.losses).float()
        return losses.amax() + losses.amin()

    def blamed_loss(self, window: Window, nonfinite: Any) -> Any:
        if window.circle.group is not None or not window.circle.everyone or not self.flags:
            return False
        if len(self.flags) == 1:
            return self.flags[0]
        losses = torch.stack(self.losses)
        return losses.any().logical_and(losses.all().logical_or(nonfinite))

    def leave_out(self, micro_batches: list[int]) -> None:
        super().leave_out(micro_batches)
        self.flags = [torch.zeros((), dtype=torch.bool, device=self.device) for _ in self.flags]
        self.losses = list(self.flags)

    def recheck(self, window: Window) -> None:
        if window.circle.group is None and window.grads:
            assert window.reading is not None
            window.look = device_look(window.grads, torch.ones_like(self.tensors.scale), norm=False)
            bad = window.look.nonfinite.logical_or(window.reading.nonfinite)
            window.reading = window.reading._replace(nonfinite=bad, checked=True)

    def lacks_norm(self, window: Window) -> bool:
        asked = bool(window.grads) or window.circle.group is not None
        return asked and not window.has_norm

    def take_norm(self, window: Window) -> None:
        ones = torch.ones_like(self.tensors.scale)
        if window.grads:
            window.look = device_look(window.grads, ones, norm=True)
            window.norm = window.look.norm
        if window.circle.has_own:
            window.has_norm = True
            own, shared = self.own_and_shared(window)
            said = Said(False, 0, 0, 0, own=own, shared=shared, scale=self.tensors.scale)
            window.norm = agree_on_device(said, window.circle, self.device).norm

    def clip(self, window: Window, max_norm: float) -> Any:
        if not window.grads and window.circle.group is None:
            return torch.zeros_like(self.tensors.scale)
        window.coefficient = (max_norm / (window.norm + 1e-6)).clamp(max=1.0)
        return window.norm

    def finish(self, window: Window, reading: Reading, retries_left: int, call: Any) -> Any:
        args, kwargs = call
        window.stepped, window.reading = True, reading  # skip="all": that of all optimizers
        if not window.grads and window.circle.group is None and not self.left_out:
            window.verdict, window.cause = Verdict.SKIP, Cause.NO_GRADIENTS
            return None
        coefficient = window.coefficient
        waits = retries_left or window.done or not window.grads or "grad_scaler" in kwargs
        if is_fused(window.optimizer) and not waits and not must_know(window.optimizer):
            held = None if window.unscaled else self.tensors.scale
            grad_scale = held if held is not None else torch.ones_like(self.tensors.scale)
            if isinstance(coefficient, Tensor):
                grad_scale = grad_scale / coefficient
            bad = reading.nonfinite
            if isinstance(reading.loss_nonfinite, Tensor):
                bad = bad.logical_or(reading.loss_nonfinite)
            return folded_step(window.optimizer, grad_scale, bad.float(), *args, **kwargs)
        known = window.loss_known
        window.verdict, window.cause = self.decided(reading, known, retries_left)  # the one read
        window.stepped = window.verdict is not Verdict.RETRY
        if window.verdict is not Verdict.APPLY or window.done:
            return None
        factor = coefficient if window.unscaled else self.inverse() * coefficient
        if "grad_scaler" in kwargs:  # takes the scale out by itself
            factor = coefficient
        if isinstance(window.optimizer, MasterWeights):
            return folded_step(window.optimizer, 1 / factor, None, *args, **kwargs)
        multiply(window.params, window.grads, factor)
        return window.optimizer.step(*args, **kwargs)

    def decided(
        self, reading: Reading, loss_known: Any, retries_left: int = 0
    ) -> tuple[Verdict, Cause]:
        """The verdict, for those who cannot go on without it: one read."""
        copy = _Copy(self.device)
        seen = [reading.nonfinite, reading.amax, reading.loss_nonfinite, reading.checked]
        values = copy.values(copy.add([*self.tensors, *seen, reading.probe_amax, loss_known]))
        state = ScaleState(values[0], *map(int, values[1:7]))
        nonfinite, amax, dead, checked, probe, known = values[7:]
        told = Reading(nonfinite > 0, amax, dead > 0, checked > 0, probe_amax=probe)
        return decide(
            told, state, self.rule, self.limits, loss_known=known > 0, retries_left=retries_left
        )

    def told(self, values: list[float]) -> tuple[ScaleState, Reading]:
        scale, skips, left, nonfinite, dead, checked = values
        state = self.rule.init()._replace(scale=scale, skips=int(skips), left=int(left))
        return state, Reading(nonfinite > 0, math.inf, dead > 0, checked > 0)

    def result(self, window: Window, retries: int) -> StepResult:
        """A result that is fetched when asked, with everything else of this window."""
        reading, found, params = window.reading, window.look, window.params
        assert reading is not None
        calls, notes, circle = self.calls, self.notes(), window.circle
        left_out, copy = self.left_out, self.copy
        # Not the window itself: it would keep all gradients alive until somebody looks.
        verdict_known, cause_known = window.verdict, window.cause
        state = self.tensors
        held = [state.scale.clone(), state.skips.clone(), state.left.clone()]
        seen = [reading.nonfinite, reading.loss_nonfinite, reading.checked, window.norm]
        where = copy.add([*held, *seen, window.loss_known, window.told, *self.flags])

        def read() -> StepResult:
            *telling, norm, known, culprit = copy.values(where)[:9]
            flags = copy.values(where)[9:]
            before, told = self.told(telling)
            verdict, cause = verdict_known, cause_known
            if verdict is None:
                verdict, cause = decide(told, before, self.rule, self.limits, loss_known=known > 0)
            bad = verdict is not Verdict.APPLY and cause is not Cause.NO_GRADIENTS
            which = next((i for i, f in enumerate(flags) if f), calls - 1) if calls > 1 else None
            which = left_out[0] if left_out else which
            blamed: tuple[Culprit, ...] = ()
            if found is not None and found.order and told.nonfinite:
                blamed = culprits_by_peak(params, found, self.names)
            blamed = with_told(blamed, int(culprit), circle, self.names)
            norm = math.nan if told.nonfinite else norm
            object.__setattr__(later, "before", before)
            return StepResult(
                verdict, cause, before.scale, norm, blamed, retries, which if bad else None, notes
            )

        later = LaterResult(read)
        return later

    def combined(self) -> Reading:
        readings = [w.reading for w in self.windows.values() if w.reading is not None]
        seen = [r for r in readings if r.checked is not False]
        if not seen:
            return Reading(nonfinite=False, amax=0.0, checked=False)
        all_of = seen[0]
        for r in seen[1:]:
            all_of = all_of._replace(
                nonfinite=all_of.nonfinite.logical_or(r.nonfinite),
                amax=torch.maximum(all_of.amax, r.amax) if self.want_amax else math.inf,
                loss_nonfinite=_either(all_of.loss_nonfinite, r.loss_nonfinite),
                norm=torch.hypot(all_of.norm, r.norm) if self.want_norm else math.nan,
                probe_amax=largest((all_of.probe_amax, r.probe_amax)),
            )
        return all_of

    def advance(self, reading: Reading, *, retry: bool = False) -> None:
        reading = self.with_left_out(reading)
        tell(self, reading, self.tensors.scale, retry)
        self.learned = True
        after = self.rule.advance(self.tensors, reading, torch)
        if retry or self.stepped_without_some():
            kept = self.tensors.skips if retry else torch.zeros_like(self.tensors.skips)
            after = after._replace(skips=kept)
        elif reading.checked is not False:
            self.skips_seen.add_(after.skips > 0)
        for held, new in zip(self.tensors, after):
            if new is not held:
                held.copy_(new)
        if math.isfinite(self.ceiling):
            self.tensors.scale.clamp_(max=self.ceiling)

    def facts(self, reading: Reading, loss: Any) -> Callable[[], Facts]:
        """Sends everything about this window over; it is read one step later."""
        copy, some = self.copy, self.stepped_without_some()
        bad = False if some else reading.nonfinite
        numbers = [reading.amax, bad, reading.norm, loss, self.tensors.scale, reading.probe_amax]
        where = copy.add(numbers)
        copy.start()

        def read() -> Facts:
            amax, nonfinite, norm, total, next_scale, probe = copy.values(where)
            return Facts(amax, nonfinite > 0, norm, total, next_scale, probe)

        return read

    def scale_tensor(self) -> Tensor:
        return self.tensors.scale

    def skipped_steps(self) -> int:
        return int(self.skips_seen)


def _either(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.logical_or(b)
    return a if isinstance(a, Tensor) else b

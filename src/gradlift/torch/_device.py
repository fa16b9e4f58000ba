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
from ..verdict import Cause, LaterResult, StepResult, Verdict, decide
from ._agree import agree
from ._apply import folded_step, is_fused, must_know
from ._gradients import multiply
from ._inspect import device_look, not_finite
from ._masters import MasterWeights
from ._names import culprits_by_peak
from ._probe import largest, tell
from ._track import Facts, Track, Window


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
        # A number is filled in on the device: copying it there would wait for the device.
        return torch.stack(
            [
                x.to(self.device, non_blocking=True).reshape(()).float()
                if isinstance(x, Tensor)
                else torch.full((), float(x), device=self.device)
                for x in self.scalars
            ]
        )

    def start(self) -> None:
        """Begins the copy without waiting for it."""
        packed = self._packed()
        if packed.device.type == "cuda":
            self.host = torch.empty(packed.shape, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = packed.cpu()

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

    def factor(self, device: torch.device) -> Any:
        return self.tensors.scale.to(device, non_blocking=True)

    def inverse(self) -> Any:
        return self.tensors.scale.reciprocal()

    def note(self, loss: Tensor) -> None:
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
        if not window.grads:
            gone = bool(self.left_out)
            dead = gone and not self.spoiled
            nothing = Reading(gone, math.inf if gone else 0.0, dead, checked=gone)
            window.reading = self.agreed(nothing)
            return
        window.look = found = device_look(
            window.grads,
            self.inverse(),
            norm=norm or self.want_norm,
            amax=self.want_amax,
            clips=norm,
            full=self.positions(window),
        )
        window.norm, window.has_norm = found.norm, norm or self.want_norm
        window.reading = self.agreed(
            Reading(
                nonfinite=found.nonfinite,
                amax=found.amax,
                loss_nonfinite=self.blamed_loss(found.nonfinite),
                norm=window.norm,
                probe_amax=self.probed(window),
            )
        )

    def probed(self, window: Window) -> Any:
        peak = super().probed(window)
        return peak.to(self.device, non_blocking=True) if isinstance(peak, Tensor) else peak

    def blamed_loss(self, nonfinite: Any) -> Any:
        if not self.speaks_for_all or not self.flags:
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
        if self.group is None and window.grads:
            assert window.reading is not None
            window.look = device_look(window.grads, torch.ones_like(self.tensors.scale), norm=False)
            bad = window.look.nonfinite.logical_or(window.reading.nonfinite)
            window.reading = window.reading._replace(nonfinite=bad, checked=True)

    def lacks_norm(self, window: Window) -> bool:
        return bool(window.grads) and not window.has_norm

    def take_norm(self, window: Window) -> None:
        if window.grads:
            ones = torch.ones_like(self.tensors.scale)
            window.norm = device_look(window.grads, ones, norm=True).norm

    def agreed(self, reading: Reading) -> Reading:
        return reading if self.group is None else agree(reading, self.group, self.device)

    def clip(self, window: Window, max_norm: float) -> Any:
        if not window.grads:
            return torch.zeros_like(self.tensors.scale)
        window.coefficient = (max_norm / (window.norm + 1e-6)).clamp(max=1.0)
        return window.norm

    def finish(self, window: Window, reading: Reading, retries_left: int, call: Any) -> Any:
        args, kwargs = call
        window.stepped = True
        if not window.grads and self.group is None and not self.left_out:
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
        window.verdict, window.cause = self.decided(reading, retries_left)  # the one read
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

    def decided(self, reading: Reading, retries_left: int = 0) -> tuple[Verdict, Cause]:
        """The verdict, for those who cannot go on without it: one read."""
        copy = _Copy(self.device)
        seen = [reading.nonfinite, reading.amax, reading.loss_nonfinite, reading.checked]
        values = copy.values(copy.add([*self.tensors, *seen, reading.probe_amax]))
        state = ScaleState(values[0], *map(int, values[1:7]))
        nonfinite, amax, dead, checked, probe = values[7:]
        told = Reading(nonfinite > 0, amax, dead > 0, checked > 0, probe_amax=probe)
        known = self.calls > 0 and self.speaks_for_all
        return decide(
            told, state, self.rule, self.limits, loss_known=known, retries_left=retries_left
        )

    def told(self, values: list[float]) -> tuple[ScaleState, Reading]:
        scale, skips, left, nonfinite, dead, checked = values
        state = self.rule.init()._replace(scale=scale, skips=int(skips), left=int(left))
        return state, Reading(nonfinite > 0, math.inf, dead > 0, checked > 0)

    def result(self, window: Window, retries: int) -> StepResult:
        """A result that is fetched when asked, with everything else of this window."""
        reading, found, params = window.reading, window.look, window.params
        assert reading is not None
        calls, notes, known = self.calls, self.notes(), self.calls > 0 and self.speaks_for_all
        left_out, copy = self.left_out, self.copy
        # Not the window itself: it would keep all gradients alive until somebody looks.
        verdict_known, cause_known = window.verdict, window.cause
        state = self.tensors
        held = [state.scale.clone(), state.skips.clone(), state.left.clone()]
        seen = [reading.nonfinite, reading.loss_nonfinite, reading.checked, window.norm]
        where = copy.add([*held, *seen, *self.flags])

        def read() -> StepResult:
            *telling, norm = copy.values(where)[:7]
            flags = copy.values(where)[7:]
            before, told = self.told(telling)
            verdict, cause = verdict_known, cause_known
            if verdict is None:
                verdict, cause = decide(told, before, self.rule, self.limits, loss_known=known)
            bad = verdict is not Verdict.APPLY and cause is not Cause.NO_GRADIENTS
            which = next((i for i, f in enumerate(flags) if f), calls - 1) if calls > 1 else None
            which = left_out[0] if left_out else which
            blamed: tuple[str, ...] = ()
            if found is not None and found.order and told.nonfinite:
                blamed = culprits_by_peak(params, found, self.names)
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
        return all_of._replace(nonfinite=True) if self.spoiled else all_of

    def advance(self, reading: Reading, *, retry: bool = False) -> None:
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

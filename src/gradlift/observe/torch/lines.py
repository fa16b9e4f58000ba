"""Lines of a run that torch's own scaler, or no scaler, trains.

    Losses, Seen (an optimizer's gradients)  ->  StepLines.finish  ->  Channel

Numbers of an accelerator are sent to the host without waiting, and written one step later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import (
    HALF_LOSS,
    Cause,
    Culprit,
    Finished,
    Verdict,
    cause_of,
    loss_blamed,
    loss_level,
    result_of,
    weights_nonfinite,
)
from ...errors import SettingsError
from ...journal import Channel
from ...reading import Reading
from ...rules import Backoff, Rule, ScaleState, preset
from ...rules.base import is_power_of_two
from ...torch.names import culprits_by_peak, nonfinite_weights
from ...torch.ranks.agreement import world_size
from ...torch.ranks.sharding import local
from ...torch.scaler.finite_check import Inspection

Number = float | Tensor
"""A Python number, or a 0-d tensor on a device that has not been read yet."""


class Losses:
    """The losses of one step, and whether each was finite."""

    def __init__(self) -> None:
        self.values: list[Number] = []
        self.half = False
        self.known = True
        """False if some could not be read, such as those of a generator."""

    def add(self, outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            self.half = self.half or outputs.dtype is torch.float16
            own = local(outputs.detach())
            self.values.append(value(own if own.numel() == 1 else own.float().sum()))
        elif isinstance(outputs, (list, tuple)):
            for each in outputs:
                self.add(each)
        else:
            self.known = False

    @property
    def finite(self) -> bool:
        return are_finite(self.values)


class Seen:
    """What one optimizer's gradients showed before anything changed them."""

    def __init__(self, params: list[Tensor], names: dict[int, str], lr: float) -> None:
        self.params, self.names, self.lr = params, names, lr
        """The parameters are those that have a gradient."""
        self.look: Inspection | None = None
        self.shares: dict[str, dict[str, Any]] | None = None
        self.culprits: tuple[Culprit, ...] = ()
        self.found_inf: list[Number] = []
        """torch's own finding by device; empty if there is no scaler."""
        self.unscaled = False
        self.bad_weights: list[Culprit] | None = None
        """Weights that were not finite before the step; None: not looked at."""

    def weights_nonfinite(self) -> list[Culprit]:
        """Parameters whose weights were not finite before the step, or are not now."""
        if self.bad_weights is None:
            self.bad_weights = list(nonfinite_weights(self.params, self.params, self.names))
        return self.bad_weights

    def numbers(self) -> list[Number]:
        shown = self.look
        if shown is None:
            return list(self.found_inf)
        peaks = [] if shown.peaks is None else list(shown.peaks)
        return [*self.found_inf, shown.nonfinite, shown.norm, shown.amax, *peaks]


class StepLines:
    """What is known of the lines of one scaler, or of one optimizer without a scaler."""

    def __init__(self, channel: Channel, scaler: Any = None) -> None:
        self.channel, self.has_scaler = channel, scaler is not None
        self.steps = 0
        self.losses = Losses()
        self.window: list[Seen] = []
        self.within: set[str] = set()
        """Methods of the scaler that are being called: a subclass may call its parent's."""
        self.last_bad, self.last_scale = False, math.nan
        """Of the last step that was written: was it not finite, and the scale."""
        self.late: list[Callable[[], None]] = []
        """What a device has not sent yet."""

    def finish(
        self,
        window: list[Seen],
        losses: Losses,
        scale: Number,
        after: Number,
        *,
        forced_late: bool = False,
    ) -> None:
        """Writes a finished step, at once or when a device has sent its numbers."""
        step, self.steps = self.steps, self.steps + 1
        numbers = [scale, after, *losses.values, *(x for seen in window for x in seen.numbers())]
        self.flush()
        if not is_late(numbers, forced=forced_late):
            self._write(step, window, losses, map(float, numbers))
            return
        sent = Sent(numbers)
        self.late.append(lambda: self._write(step, window, losses, iter(sent.values())))

    def flush(self) -> None:
        late, self.late = self.late, []
        for write in late:
            write()

    def _write(
        self, step: int, window: list[Seen], losses: Losses, numbers: Iterator[float]
    ) -> None:
        scale, after = next(numbers), next(numbers)
        values = [next(numbers) for _ in losses.values]
        nonfinite, found_inf, squares, amax = False, False, 0.0, -math.inf
        blamed: list[Culprit] = []
        for seen in window:
            found = [next(numbers) for _ in seen.found_inf]
            found_inf = found_inf or any(found)
            shown = seen.look
            if shown is not None:
                nonfinite = bool(next(numbers)) or nonfinite
                norm, top = next(numbers), next(numbers)
                squares, amax = squares + norm * norm, max(amax, top)
                if shown.peaks is not None:
                    peaks = torch.tensor([next(numbers) for _ in shown.order])
                    seen.culprits = culprits_by_peak(
                        seen.params, shown._replace(peaks=peaks), seen.names
                    )
            else:
                squares = math.nan
            blamed += seen.culprits
            if seen.shares is not None:
                self.channel.sample(step, seen.shares, due=True)
        nonfinite = nonfinite or found_inf
        checked = any(seen.params for seen in window)
        level = loss_level([not math.isfinite(x) for x in values])
        reading = Reading(
            nonfinite,
            amax if amax >= 0 else math.nan,
            loss_nonfinite=loss_blamed(level, nonfinite),
            checked=checked,
            norm=math.sqrt(squares) / scale if scale and checked else math.nan,
        )
        notes = [HALF_LOSS] if losses.half and self.has_scaler else []
        if nonfinite or level:
            weights = [bad for seen in window for bad in seen.weights_nonfinite()]
            notes += [weights_nonfinite(weights)] if weights else []
        rule = self.channel.rule
        before, cause = ScaleState(scale), Cause.NONE
        if nonfinite or level or not checked:
            known = bool(values) and losses.known and world_size(None) <= 1
            cause = Cause(cause_of(reading, before, rule, loss_known=known))
        finished = Finished(
            step,
            before,
            after,
            reading,
            cause,
            loss=sum(values) if values else math.nan,
            culprits=tuple(blamed) if nonfinite else (),
            notes=tuple(notes),
            lr=window[0].lr,
        )
        self.last_bad, self.last_scale = nonfinite or bool(level), scale
        skipped = found_inf or not checked
        self.channel.step(finished, result_of(finished, Verdict.SKIP if skipped else Verdict.APPLY))


class Sent:
    """0-d tensors of a device in one transfer that is not waited for."""

    def __init__(self, numbers: list[Number]) -> None:
        self.numbers = numbers
        tensors = [x.detach().float() for x in numbers if isinstance(x, Tensor)]
        home = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
        packed = torch.stack([t.to(home, non_blocking=True) for t in tensors])
        self.event: Any = None
        if home.type == "cuda":
            self.host = torch.empty(packed.shape, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = packed.cpu()

    def values(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        read = iter(self.host.tolist())
        return [next(read) if isinstance(x, Tensor) else float(x) for x in self.numbers]


def are_finite(numbers: Sequence[Number]) -> bool:
    """As far as is known without waiting for a device."""
    return all(isinstance(x, Tensor) or math.isfinite(x) for x in numbers)


def is_late(numbers: Sequence[Number], *, forced: bool = False) -> bool:
    """Does reading them mean waiting for a device? `forced` treats the CPU as one, for tests."""
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    return bool(tensors) and (forced or any(t.device.type != "cpu" for t in tensors))


def value(x: Any) -> Number:
    """A scalar tensor's value: read at once on the CPU, where that is free; else a copy, since
    torch writes its scale in place."""
    if not isinstance(x, Tensor):
        return float(x)
    return x.item() if x.device.type == "cpu" else x.detach().clone()


def rule_of(scaler: Any) -> Rule:
    """The rule of `torch.amp.GradScaler` with its own numbers, whatever they are."""
    init, factors = scaler._init_scale, (scaler._growth_factor, scaler._backoff_factor)
    torchs = preset("torch")
    try:
        return Backoff(
            init_scale=init,
            growth_factor=factors[0],
            backoff_factor=factors[1],
            growth_interval=scaler._growth_interval,
            min_scale=torchs.min_scale,
            max_scale=torchs.max_scale,
            powers_of_two=all(map(is_power_of_two, (init, *factors))),
        )
    except SettingsError:
        return torchs

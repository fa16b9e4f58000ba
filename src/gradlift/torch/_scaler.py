"""`GradScaler`: torch's own interface, with the core's rules, verdicts and journal behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import MisuseError, SettingsError
from ..journal import Event, Journal
from ..rules import Backoff, Off, Rule, parse
from ..rules._rule import is_power_of_two
from ..verdict import Cause, Limits, StepResult, Verdict
from ._accumulate import DropBad
from ._apply import Snapshot, is_fused, multiply, refuse
from ._device import DeviceTrack
from ._drop_in import torch_rule, with_scale
from ._names import Names, named
from ._report import Report, Told, learning_rate
from ._retry import Replay
from ._state import load, save
from ._track import Track, Window


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for PyTorch: change one import, keep the loop.

    The first six arguments are those of `torch.amp.GradScaler`, and with them alone scales, skips
    and weights are torch's to the bit, as long as each loss is finite and the scale stays in
    bounds. The others:

    | argument | meaning |
    |---|---|
    | `rule` | a rule, or its text: "auto", "megatron:hysteresis=4"; None: torch's own rule |
    | `min_scale`, `max_scale` | bounds of torch's own rule |
    | `on_floor`, `max_consecutive_skips` | when to stop a run that only skips |
    | `skip` | several optimizers: "each" skips by itself, or one bad one skips "all" (they then \
step in `update()`) |
    | `process_group` | agree with other ranks, in one small collective a step |
    | `journal` | a `gradlift.Journal` to record to; `sample_every` adds statistics by parameter |
    | `names` | a model, or name -> parameter, for culprits; None: found when needed |
    | `allow_fp16_params` | go on with float16 parameters, which lose small updates |
    | `on_event` | called with each skip, retry and halt |

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu")
    >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    >>> scaler.step(optimizer, max_norm=1.0)
    >>> scaler.update()
    >>> scaler.result.stepped, scaler.result.cause
    (True, <Cause.NONE: 0>)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        rule: Rule | str | float | None = None,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        on_floor: str = "hold",
        max_consecutive_skips: int | None = None,
        skip: str = "each",
        process_group: Any = None,
        journal: Journal | None = None,
        names: Names = None,
        allow_fp16_params: bool = False,
        on_event: Callable[[Event], None] | None = None,
        sample_every: int | None = None,
    ) -> None:
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn(
                "GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2
            )
            self._enabled = False
        if skip not in ("each", "all"):
            raise SettingsError(f"skip is {skip!r}, expected 'each' or 'all'")
        factors = growth_factor, backoff_factor, growth_interval
        self._torch_rule = rule is None
        self._rule: Rule = (
            torch_rule(init_scale, *factors, min_scale, max_scale) if rule is None else parse(rule)
        )
        self._factors: list[Any] = list(factors)
        self._limits = Limits(max_consecutive_skips, on_floor)
        self._skip = skip
        self._group = process_group
        self._names = named(names)
        self._allow_fp16_params = allow_fp16_params
        self._report = Report(
            self._rule, self._limits, journal, self._names, on_event, sample_every
        )
        self._force_device_path = False  # for tests: CPU tensors take the accelerator's path
        self._tracks: dict[str | None, Track] = {None: self._new_track()}
        self._dropping: DropBad | None = None
        self.result: StepResult | None = None
        """What the last step came to; valid until the next one."""

    def _new_track(self) -> Track:
        recorded = self._report.journal is not None
        return Track(
            self._rule,
            limits=self._limits,
            group=self._group,
            names=self._names,
            allow_fp16_params=self._allow_fp16_params,
            want_amax=self._rule.magnitudes or recorded,
            want_norm=recorded,
        )

    def _track(self, key: str | None, device: torch.device | None = None) -> Track:
        """The track of a key; it moves to the device where its first loss or parameter lies."""
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new_track()
        if device is None or (device.type == "cpu" and not self._force_device_path):
            return track
        if not isinstance(track, DeviceTrack):
            track = self._tracks[key] = DeviceTrack.take(track, device)
        return track

    @property
    def _active(self) -> bool:
        return self._enabled and not isinstance(self._rule, Off)

    # scale

    def scale(self, outputs: Any, *, key: str | None = None) -> Any:
        """loss * scale; a list or tuple is scaled one by one. `key` names one of several losses.

        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(torch.tensor(0.5))
        tensor(4.)
        """
        if not self._active:
            return outputs
        if isinstance(outputs, Tensor):
            if self._dropping is not None:
                self._dropping.micro_batch_done()
            return self._track(key, outputs.device).scaled(outputs)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(x, key=key) for x in outputs)
        if isinstance(outputs, Iterable):
            return (self.scale(x, key=key) for x in outputs)
        raise MisuseError(
            f"scale() wants a tensor or an iterable of tensors, this is {type(outputs).__name__}"
        )

    # inspect, unscale, clip

    def _inspected(
        self, optimizer: Any, key: str | None, call: str, *, norm: bool = False
    ) -> tuple[Track, Window]:
        refuse(optimizer)
        track = self._track(key, _home(optimizer))
        window = track.window(optimizer)
        if window.stepped or window.deferred:
            raise MisuseError(
                f"{call} was called after step() on this optimizer: call scaler.update() first, "
                "once an iteration"
            )
        return track, track.inspect(window, norm=norm)

    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        """Takes the scale out of the gradients, so that they can be looked at or clipped by hand.

        Calling it again in the same window does nothing. `clip_grad_norm_` is faster.
        """
        if self._active:
            track, window = self._inspected(optimizer, key, "unscale_()")
            track.unscale(window)

    def clip_grad_norm_(self, optimizer: Any, max_norm: float, *, key: str | None = None) -> Tensor:
        """Clips the true gradients at `max_norm` and returns their norm before clipping.

        Replaces `unscale_` and `torch.nn.utils.clip_grad_norm_`. The multiplication is left to
        `step`, where a fused optimizer does it for nothing; until then `.grad` is untouched.

        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu")
        >>> scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> scaler.clip_grad_norm_(optimizer, 1.0)
        tensor(5.)
        """
        if not max_norm > 0:
            raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
        if not self._active:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm)
        track, window = self._inspected(optimizer, key, "clip_grad_norm_()", norm=True)
        return track.clip(window, max_norm)

    # step

    def step(
        self,
        optimizer: Any,
        *args: Any,
        max_norm: float | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps the optimizer if its gradients are sound; `scaler.result` says what came of it.

        `max_norm` clips on the way. Optimizers that take a closure (LBFGS) get one that scales:
        `scaler.scale(loss).backward()`, returning the plain loss; an overflow anywhere in their
        search puts parameters and state back.
        """
        if max_norm is not None:
            self.clip_grad_norm_(optimizer, max_norm, key=key)
        if not self._active:
            self.result = StepResult(Verdict.APPLY, Cause.NONE, 1.0)
            return optimizer.step(*args, **kwargs)
        closure = kwargs.get("closure") or (args[0] if args and callable(args[0]) else None)
        if closure is not None:
            return self._closure_step(optimizer, closure, key)
        if "grad_scaler" in _step_arguments(optimizer):
            kwargs["grad_scaler"] = self
        track, window = self._inspected(optimizer, key, "step()")
        if self._skip == "all":
            window.deferred = (args, kwargs)
            return None
        return self._finish(track, window, window.reading, (args, kwargs))

    def _finish(
        self,
        track: Track,
        window: Window,
        reading: Any,
        call: Any,
        retries_left: int = 0,
        retries: int = 0,
    ) -> Any:
        """Decides, applies or not, and says so in `result`."""
        self._report.begin(track, window)
        value = track.finish(window, reading, retries_left, call)
        window.result = self.result = track.result(window, retries, soon=self._report.wanted)
        if window.verdict is Verdict.HALT:
            before, step, result = track.numbers(), track.steps, self.result
            self._end_window(None, track)
            raise self._report.halt(result, before, step)
        return value

    def _closure_step(self, optimizer: Any, closure: Callable[[], Any], key: str | None) -> Any:
        refuse(optimizer)
        track = self._track(key, _home(optimizer))
        before = Snapshot(optimizer)

        def guarded() -> Any:
            track.windows.pop(id(optimizer), None)
            with torch.enable_grad():
                loss = closure()
            window = track.inspect(track.window(optimizer))
            if _is_bad(window.reading):
                raise _Overflow
            multiply(window.params, window.grads, track.inverse())
            return loss

        value = None
        with contextlib.suppress(_Overflow):
            value = optimizer.step(guarded)
        window = track.window(optimizer)
        if window.reading is None:
            raise MisuseError(
                f"{type(optimizer).__name__}.step() never called its closure: pass a closure that "
                "calls scaler.scale(loss).backward() and returns the loss"
            )
        if _is_bad(window.reading):
            before.restore()
            optimizer.zero_grad()
        window.done = True
        self._finish(track, window, window.reading, ((), {}))
        return value

    # update

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale (of every key) by what the steps since the last update showed.

        `new_scale` sets it by hand. Without a step in between there is nothing to do.
        """
        if not self._active:
            return
        if new_scale is not None:
            track = self._track(None)
            track.put(with_scale(self._rule, track.numbers(), float(new_scale)))
            track.clear()
            return
        for key, track in list(self._tracks.items()):
            if track.windows:
                self._end_window(key, track)

    def _end_window(self, key: str | None, track: Track) -> None:
        reading = track.combined()
        for window in track.windows.values():
            if window.deferred and not window.stepped:
                self._finish(track, window, reading, window.deferred)
        results = [w.result for w in track.windows.values() if w.result is not None]
        if not results:
            return  # unscale_() without step(): the window goes on
        loss = track.loss if track.calls else math.nan
        lr = learning_rate(track)
        track.advance(reading)
        told = Told(key, track.steps, reading, results, track.next_scale(), loss, lr)
        track.steps += 1
        track.clear()
        if not isinstance(track, DeviceTrack):
            self._report.now(told)
        elif self._report.wanted:
            self._report.later(told)

    # a whole step

    def train_step(
        self,
        closure: Callable[[], Any],
        optimizer: Any,
        *,
        max_norm: float | None = None,
        retries: int = 0,
        model: torch.nn.Module | bool | None = None,
        scheduler: Any = None,
        key: str | None = None,
    ) -> StepResult:
        """zero_grad, forward, scale, backward, clip, step, update; on overflow once more.

        `closure()` returns the loss, or a tuple of losses to be added up; it calls neither
        backward nor the data loader. After an overflow the same batch is computed again at the
        lower scale, up to `retries` times, with random states and `model`'s buffers put back
        (`model=False`: nothing to put back). `scheduler` moves only if the step was applied. After
        a skip the gradients are cleared.
        """
        if retries and model is None:
            raise MisuseError(
                "retries need model=, whose buffers are put back before a batch is computed again "
                "(model=False says that nothing needs it)"
            )
        kept = Replay(model, optimizer) if retries and self._active else None
        for tries in range(retries + 1):
            optimizer.zero_grad(set_to_none=True)
            losses = closure()
            loss = sum(losses[1:], losses[0]) if isinstance(losses, (tuple, list)) else losses
            self.scale(loss, key=key).backward()
            if kept is None:
                self.step(optimizer, max_norm=max_norm, key=key)
                break
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm, key=key)
            track, window = self._inspected(optimizer, key, "step()")
            self._finish(track, window, window.reading, ((), {}), retries - tries, tries)
            if window.verdict is not Verdict.RETRY:
                break
            track.advance(track.combined())
            self._report.event(key, track.steps, self._result, track.numbers().scale)
            track.clear()
            kept.restore()
        self.update()
        if not self._result.stepped:
            optimizer.zero_grad(set_to_none=True)
        elif scheduler is not None:
            scheduler.step()
        return self._result

    @property
    def _result(self) -> StepResult:
        assert self.result is not None
        return self.result

    # accumulation

    @contextlib.contextmanager
    def accumulate(self, optimizer: Any, *, drop_bad: bool = True) -> Iterator[DropBad]:
        """Micro-batches in a side buffer: a bad one is left out instead of spoiling the window.

        Costs one more copy of the gradients, and one read and one addition a micro-batch. The sum
        is over the clean micro-batches: if you divide each loss by their number, a window with one
        of four left out has three quarters of its usual length; `kept` and `dropped` tell. An
        overflow that was left out still lowers the scale.

        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
        >>> with scaler.accumulate(optimizer) as window:
        ...     for x in (1.0, 1e38, 2.0):
        ...         scaler.scale((w * x * x).sum()).backward()
        >>> window.dropped, w.grad
        ([1], tensor([5.]))
        """
        dropping = DropBad(optimizer, active=self._active and drop_bad)
        self._dropping = dropping if dropping.active else None
        try:
            yield dropping
            dropping.finish()
        finally:
            self._dropping = None
        if dropping.dropped:
            self._track(None, _home(optimizer)).leave_out(dropping.dropped)

    # counters, state, torch's accessors

    @property
    def skipped_steps(self) -> int:
        """Steps that were not applied, of all keys."""
        return sum(t.skipped_steps() for t in self._tracks.values())

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied in a row, the most of any key."""
        return max(int(t.numbers().skips) for t in self._tracks.values())

    @property
    def events(self) -> list[Event]:
        """The last 64 skips, retries and halts."""
        return list(self._report.events)

    def get_scale(self, key: str | None = None) -> float:
        """The scale of the next step; 1.0 if disabled."""
        return float(self._track(key).numbers().scale) if self._active else 1.0

    def get_growth_factor(self) -> float:
        return self._factors[0]

    def get_backoff_factor(self) -> float:
        return self._factors[1]

    def get_growth_interval(self) -> int:
        return self._factors[2]

    def set_growth_factor(self, new_factor: float) -> None:
        self._set_factors(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        self._set_factors(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        self._set_factors(growth_interval=new_interval)

    def _set_factors(self, **changes: Any) -> None:
        if not isinstance(self._rule, Backoff):
            raise MisuseError(
                f"the rule {str(self._rule)!r} has no {', '.join(changes)}: pass a rule with the "
                "settings you want"
            )
        if any(k != "growth_interval" and not is_power_of_two(v) for k, v in changes.items()):
            changes["powers_of_two"] = False
        rule = dataclasses.replace(self._rule, **changes)
        self._factors = [rule.growth_factor, rule.backoff_factor, rule.growth_interval]
        self._use_rule(rule)

    def _use_rule(self, rule: Rule) -> None:
        self._rule = self._report.rule = rule
        for track in self._tracks.values():
            track.rule = rule

    def _get_scale_async(self) -> Tensor | None:
        return self._track(None).scale_tensor()

    def _get_growth_tracker(self) -> int:
        return int(self._track(None).numbers().clean) if self._active else 0

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        window = self._track(None).windows.get(id(optimizer))
        if window is None or window.reading is None:
            return {}
        bad = torch.as_tensor(window.reading.nonfinite).float()
        return {bad.device: bad}

    def state_dict(self) -> dict[str, Any]:
        """Torch's five keys, and one more, "gradlift"; JSON-able. Empty if disabled."""
        return save(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what torch's scaler or this one saved; damage is refused and changes nothing."""
        if self._enabled:
            load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the state; journal, callback and process group stay here."""
        if any(t.windows for t in self._tracks.values()):
            raise MisuseError(
                "a GradScaler can be copied or pickled between update() and the next step() only"
            )
        state = {**self.__dict__, "_saved": self.state_dict()}
        for name in ("_tracks", "_report", "_dropping", "result"):
            del state[name]
        return {**state, "_group": None, "_names": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._report = Report(self._rule, self._limits, None, self._names, None, None)
        self._tracks = {None: self._new_track()}
        self._dropping = self.result = None
        self.load_state_dict(saved)


class _Overflow(Exception):
    """Leaves an optimizer's line search."""


def _home(optimizer: Any) -> torch.device | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            return p.device
    return None


def _is_bad(reading: Any) -> bool:
    return reading is not None and bool(reading.nonfinite or reading.loss_nonfinite)


def _step_arguments(optimizer: Any) -> Iterable[str]:
    return inspect.signature(optimizer.step).parameters if is_fused(optimizer) else ()

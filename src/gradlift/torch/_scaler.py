"""`GradScaler`: torch's own interface, with the core's rules, verdicts and journal behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import MisuseError, SettingsError, StateError, TrainingHalted
from ..journal import Event, Journal, Step
from ..reading import Reading
from ..rules import Backoff, Off, Rule, ScaleState, parse
from ..rules._rule import LARGEST, is_power_of_two
from ..verdict import Cause, Limits, StepResult, Verdict, explain_halt
from ._accumulate import DropBad
from ._apply import Snapshot, is_fused, multiply, refuse
from ._device import DeviceTrack
from ._names import Names, named
from ._retry import Replay
from ._state import load, save
from ._statistics import statistics
from ._track import Track, Window

_EVENTS = 64


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
        self._torch_rule = rule is None
        self._rule = (
            _torch_rule(
                init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
            )
            if rule is None
            else parse(rule)
        )
        self._factors = [growth_factor, backoff_factor, growth_interval]
        self._limits = Limits(max_consecutive_skips, on_floor)
        self._skip = skip
        self._group = process_group
        self._journal = journal
        self._names = named(names)
        self._allow_fp16_params = allow_fp16_params
        self._on_event = on_event
        self._sample_every = sample_every
        self._force_device_path = False
        self._tracks: dict[str | None, Track] = {None: self._new_track()}
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._pending: list[Callable[[], None]] = []
        self._since = time.perf_counter()
        self._described = False
        self._dropping: DropBad | None = None
        self.result: StepResult | None = None
        """What the last step came to."""

    def _new_track(self) -> Track:
        return Track(
            self._rule,
            limits=self._limits,
            group=self._group,
            names=self._names,
            allow_fp16_params=self._allow_fp16_params,
            want_amax=self._rule.magnitudes or self._journal is not None,
            want_norm=self._journal is not None,
        )

    def _track(self, key: str | None, device: torch.device | None = None) -> Track:
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

    def _inspected(self, optimizer: Any, key: str | None, what: str, *, norm: bool) -> Any:
        refuse(optimizer)
        track = self._track(key, _home(optimizer))
        window = track.window(optimizer)
        if window.stepped or window.deferred:
            raise MisuseError(
                f"{what} was called after step() on this optimizer: call scaler.update() first, "
                "once an iteration"
            )
        return track, track.inspect(window, norm=norm)

    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        """Takes the scale out of the gradients, so that they can be looked at or clipped by hand.

        Calling it again in the same window does nothing. `clip_grad_norm_` is faster.
        """
        if self._active:
            track, window = self._inspected(optimizer, key, "unscale_()", norm=False)
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
        norm: Tensor = track.clip(window, max_norm)
        return norm

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
        if not self._active:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm)
            self.result = StepResult(Verdict.APPLY, Cause.NONE, 1.0)
            return optimizer.step(*args, **kwargs)
        closure = kwargs.get("closure") or (args[0] if args and callable(args[0]) else None)
        if closure is not None:
            return self._closure_step(optimizer, closure, max_norm, key)
        if "grad_scaler" in _step_arguments(optimizer):
            kwargs["grad_scaler"] = self
        track, window = self._inspected(optimizer, key, "step()", norm=max_norm is not None)
        if max_norm is not None:
            self.clip_grad_norm_(optimizer, max_norm, key=key)
        if self._skip == "all":
            window.deferred = (args, kwargs)
            return None
        return self._finish(track, window, window.reading, (args, kwargs))

    def _finish(
        self,
        track: Track,
        window: Window,
        reading: Reading,
        call: Any,
        retries_left: int = 0,
        retries: int = 0,
    ) -> Any:
        self._sample(track, window)
        value = track.finish(window, reading, retries_left, call)
        if isinstance(track, DeviceTrack):
            self.result = track.result(window, retries, soon=self._reports)
        else:
            self.result = track.result(window, retries)
        if window.verdict is Verdict.HALT:
            state, step, result = track.numbers(), track.steps, self.result
            self._end_window(None, track)
            self._pending.clear()
            raise self._halt(result, state, step)
        return value

    def _halt(self, result: StepResult, before: ScaleState, step: int) -> TrainingHalted:
        said = explain_halt(result.cause, before, self._rule, step=step, culprits=result.culprits)
        return TrainingHalted(said)

    def _closure_step(
        self, optimizer: Any, closure: Callable[[], Any], max_norm: float | None, key: str | None
    ) -> Any:
        track = self._track(key, _home(optimizer))
        before = Snapshot(optimizer)

        def guarded() -> Any:
            track.windows.pop(id(optimizer), None)
            with torch.enable_grad():
                loss = closure()
            window = track.inspect(track.window(optimizer), norm=max_norm is not None)
            if max_norm is not None:
                track.clip(window, max_norm)
            if _is_bad(window.reading):
                raise _Overflow
            multiply(window.params, window.grads, _product(window.coefficient, track.inverse()))
            window.unscaled, window.coefficient = True, 1.0
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
        # The optimizer has stepped already, or was put back: only the verdict is left to reach.
        window.optimizer = _Done
        self._finish(track, window, window.reading, ((), {}))
        return value

    def _sample(self, track: Track, window: Window) -> None:
        every = self._sample_every
        if self._journal is not None and every and track.steps % every == 0 and window.grads:
            self._journal.sample(track.steps, statistics(window.params, window.grads, self._names))

    # update

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale (of every key) by what the steps since the last update showed.

        `new_scale` sets it by hand. Without a step in between there is nothing to do.
        """
        if not self._active:
            return
        if new_scale is not None:
            track = self._track(None)
            value = float(new_scale)
            track.put(_with_scale(self._rule, track.numbers(), value))
            track.clear()
            return
        for key, track in list(self._tracks.items()):
            if track.windows:
                self._end_window(key, track)

    def _end_window(self, key: str | None, track: Track) -> None:
        reading = track.combined()
        for window in track.windows.values():
            if window.deferred and window.verdict is None and not window.stepped:
                self._finish(track, window, reading, window.deferred)
        if not any(w.stepped for w in track.windows.values()):
            return  # unscale_() without step(): the window goes on
        before = track.numbers() if not isinstance(track, DeviceTrack) else None
        track.advance(reading)
        self._count_and_report(key, track, reading, before)
        track.clear()

    @property
    def _reports(self) -> bool:
        return self._journal is not None or self._on_event is not None or self._limits != Limits()

    def _count_and_report(
        self, key: str | None, track: Track, reading: Reading, before: ScaleState | None
    ) -> None:
        result, step, loss = self.result, track.steps, track.loss
        if result is None:
            return
        if before is not None:  # in numbers: report at once
            nothing = result.cause is Cause.NO_GRADIENTS
            worst = next(
                (w for w in track.windows.values() if w.verdict not in (Verdict.APPLY, None)), None
            )
            if worst is not None and not nothing:
                track.skipped += 1
                shown = track.result(worst, result.retries) if worst.cause else result
                shown = dataclasses.replace(shown, scale=before.scale)
                self._tell(key, step, shown, track.state.scale)
                self._warn_at_floor(shown)
            self._record(track, step, reading, result, before.scale, track.state.scale, loss)
        elif self._reports:
            after = track.tensors.scale.clone()  # type: ignore[attr-defined]
            self._report_late(key, track, step, reading, result, after, loss)
        track.steps += 1

    def _report_late(
        self,
        key: str | None,
        track: Track,
        step: int,
        reading: Reading,
        result: StepResult,
        after: Tensor,
        loss: Any,
    ) -> None:
        """What happened on a device is told one step later, when it has long arrived."""
        due, self._pending = self._pending, []

        def tell() -> None:
            told = reading._replace(
                amax=float(reading.amax),
                nonfinite=bool(reading.nonfinite),
                loss_nonfinite=bool(reading.loss_nonfinite),
            )
            if not result.stepped and result.cause is not Cause.NO_GRADIENTS:
                self._tell(key, step, result, float(after))
                self._warn_at_floor(result)
            self._record(track, step, told, result, result.scale, float(after), float(loss))
            if result.verdict is Verdict.HALT:
                raise self._halt(result, result.before, step)  # type: ignore[attr-defined]

        self._pending.append(tell)
        for say in due:
            say()

    def _tell(self, key: str | None, step: int, result: StepResult, next_scale: float) -> None:
        detail = {
            "cause": result.cause.name,
            "scale": result.scale,
            "next_scale": next_scale,
            "culprits": [getattr(c, "described", c) for c in result.culprits],
            "micro_batch": result.micro_batch,
        }
        if key is not None:
            detail["key"] = key
        event = Event(step, str(result.verdict), detail)
        self._events.append(event)
        if self._journal is not None:
            self._journal.event(event.what, step, **detail)
        if self._on_event is not None:
            self._on_event(event)

    def _warn_at_floor(self, result: StepResult) -> None:
        if result.cause is Cause.FLOOR and self._limits.on_floor == "warn":
            warnings.warn(
                f"non-finite gradients at the smallest scale, {result.scale:g}: the step was "
                f"skipped. Culprits: {', '.join(result.culprits) or 'unknown'}",
                stacklevel=4,
            )

    def _record(
        self,
        track: Track,
        step: int,
        reading: Reading,
        result: StepResult,
        scale: float,
        next_scale: float,
        loss: float,
    ) -> None:
        if self._journal is None:
            return
        self._describe(track)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        optimizer = next((w.optimizer for w in track.windows.values()), None)
        groups = getattr(optimizer, "param_groups", None) or [{}]
        self._journal.step(
            Step(
                step,
                scale,
                next_scale,
                amax=float(reading.amax),
                nonfinite=bool(reading.nonfinite),
                loss=loss if track.calls else math.nan,
                norm=float(reading.norm),
                lr=float(groups[0].get("lr", math.nan)),
                verdict=result.verdict,
                cause=result.cause,
                culprits=result.culprits,
                retries=result.retries,
                seconds=seconds,
            )
        )

    def _describe(self, track: Track) -> None:
        if not self._described and self._journal is not None:
            self._described = True
            params = [p for w in track.windows.values() for p in w.params]
            sizes = {self._names[id(p)]: p.numel() for p in params if id(p) in self._names}
            self._journal.describe(
                rule=str(self._rule), framework="torch", formats=["fp16"], parameters=sizes
            )

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
        tries = 0
        while True:
            optimizer.zero_grad(set_to_none=True)
            losses = closure()
            loss = sum(losses[1:], losses[0]) if isinstance(losses, (tuple, list)) else losses
            self.scale(loss, key=key).backward()
            if not self._active:
                self.step(optimizer, max_norm=max_norm)
                break
            track, window = self._inspected(optimizer, key, "step()", norm=max_norm is not None)
            if max_norm is not None:
                track.clip(window, max_norm)
            self._finish(track, window, window.reading, ((), {}), retries - tries, tries)
            if window.verdict is not Verdict.RETRY:
                self.update()
                break
            tries += 1
            self._again(key, track, window)
            assert kept is not None
            kept.restore()
        assert self.result is not None
        if self.result.stepped:
            if scheduler is not None:
                scheduler.step()
        else:
            optimizer.zero_grad(set_to_none=True)
        return self.result

    def _again(self, key: str | None, track: Track, window: Window) -> None:
        """After an overflow that will be retried: only the scale moves."""
        assert self.result is not None
        result, before = self.result, track.numbers()
        track.advance(track.combined())
        self._tell(
            key, track.steps, dataclasses.replace(result, scale=before.scale), track.numbers().scale
        )
        track.clear()

    # accumulation

    @contextlib.contextmanager
    def accumulate(self, optimizer: Any, *, drop_bad: bool = True) -> Iterator[DropBad]:
        """Micro-batches in a side buffer: a bad one is left out instead of spoiling the window.

        Costs one more copy of the gradients, and one read and one addition a micro-batch. The sum
        is over the clean micro-batches: if you divide each loss by their number, a window with one
        of four left out has three quarters of its usual length; `kept` and `dropped` tell.

        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
        >>> with scaler.accumulate(optimizer) as window:
        ...     for x in (1.0, float("inf"), 2.0):
        ...         scaler.scale((w * x).sum()).backward()
        >>> window.dropped, w.grad
        ([1], tensor([3.]))
        """
        if not self._active or not drop_bad:
            yield DropBad(optimizer, active=False)
            return
        dropping = DropBad(optimizer)
        self._dropping = dropping
        try:
            yield dropping
            dropping.finish()
        finally:
            self._dropping = None
        track = self._track(None, _home(optimizer))
        track.dead = track.dead if isinstance(track.dead, Tensor) else False
        track.bad_micro_batch = dropping.dropped[0] if dropping.dropped else None
        if isinstance(track, DeviceTrack):
            track.dead = torch.zeros_like(track.dead)

    # counters, state, torch's accessors

    @property
    def skipped_steps(self) -> int:
        """Steps that were not applied, of all keys."""
        return sum(
            int(t.skips_seen) if isinstance(t, DeviceTrack) else t.skipped
            for t in self._tracks.values()
        )

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied in a row, the most of any key."""
        return max(int(t.numbers().skips) for t in self._tracks.values())

    @property
    def events(self) -> list[Event]:
        """The last 64 skips, retries and halts."""
        return list(self._events)

    def get_scale(self, key: str | None = None) -> float:
        """The scale of the next step; 1.0 if disabled."""
        return float(self._track(key).numbers().scale) if self._active else 1.0

    def get_growth_factor(self) -> float:
        return self._factors[0]

    def get_backoff_factor(self) -> float:
        return self._factors[1]

    def get_growth_interval(self) -> int:
        return int(self._factors[2])

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
        odd = any(k != "growth_interval" and not is_power_of_two(v) for k, v in changes.items())
        if odd:
            changes["powers_of_two"] = False
        self._rule = dataclasses.replace(self._rule, **changes)
        self._factors = [
            self._rule.growth_factor,
            self._rule.backoff_factor,
            self._rule.growth_interval,
        ]
        for track in self._tracks.values():
            track.rule = self._rule

    def _get_scale_async(self) -> Tensor | None:
        track = self._track(None)
        if isinstance(track, DeviceTrack):
            return track.tensors.scale
        return torch.tensor(track.state.scale, dtype=torch.float32)

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
        if any(t.windows for t in self._tracks.values()):
            raise MisuseError(
                "a GradScaler can be copied or pickled between update() and the next step() only"
            )
        state = self.__dict__.copy()
        for left_behind in ("_journal", "_group", "_on_event"):  # belong to this process
            state[left_behind] = None
        state["_tracks"], state["_names"] = {}, {}
        state["_pending"], state["result"], state["_dropping"] = [], None, None
        state["_saved"] = self.state_dict()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._tracks = {None: self._new_track()}
        self.load_state_dict(saved)


class _Overflow(Exception):
    """Leaves an optimizer's line search."""


class _Done:
    """Stands in for an optimizer that has stepped already."""

    param_groups: tuple[Any, ...] = ()

    @staticmethod
    def step() -> None:
        return None


def _torch_rule(
    init: float, growth: float, backoff: float, interval: int, low: float, high: float | None
) -> Backoff:
    """torch's own rule, within bounds; whatever torch accepts is accepted."""
    if not growth > 1.0:
        raise SettingsError(f"growth_factor is {growth!r}, expected more than 1")
    if not 0.0 < backoff < 1.0:
        raise SettingsError(f"backoff_factor is {backoff!r}, expected a number in (0, 1)")
    if not (math.isfinite(init) and init > 0):
        raise SettingsError(f"init_scale is {init!r}, expected a finite number above 0")
    high = LARGEST if high is None else high
    odd = {
        name: value
        for name, value in (("init_scale", init), ("growth", growth), ("backoff", backoff))
        if not is_power_of_two(value)
    }
    if odd:
        name, value = next(iter(odd.items()))
        warnings.warn(
            f"{name} is {value!r}, not a power of two: every gradient will be rounded once more "
            "when it is unscaled",
            stacklevel=4,
        )
    if not low <= init <= high:
        warnings.warn(
            f"init_scale is {init!r}, outside [{low:g}, {high:g}]: the nearest bound is used",
            stacklevel=4,
        )
    return Backoff(
        init_scale=min(max(init, low), high),
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=low,
        max_scale=high,
        powers_of_two=not odd,
    )


def _with_scale(rule: Rule, state: ScaleState, scale: float) -> ScaleState:
    """`state` with another scale, or an error if the rule could not have it."""
    if not (math.isfinite(scale) and scale > 0):
        raise StateError(f"scale is {scale!r}, expected a finite number above 0")
    return state._replace(scale=min(max(scale, rule.min_scale), rule.max_scale))


def _home(optimizer: Any) -> torch.device | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            return p.device
    return None


def _is_bad(reading: Reading | None) -> bool:
    return reading is not None and bool(reading.nonfinite or reading.loss_nonfinite)


def _product(coefficient: Any, inverse: Any) -> Any:
    return coefficient * inverse


def _step_arguments(optimizer: Any) -> Any:
    if not is_fused(optimizer):
        return ()
    return inspect.signature(optimizer.step).parameters

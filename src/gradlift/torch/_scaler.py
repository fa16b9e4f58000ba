"""`GradScaler`: torch's own interface, with the core's rules, verdicts and journal behind it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import MisuseError, SettingsError
from ..verdict import Cause, StepResult, Verdict
from ._accumulate import DropBad
from ._apply import Snapshot, is_fused, refuse, take_in
from ._calibrate import calibrate
from ._device import DeviceTrack
from ._drop_in import DropIn, with_scale_allowed
from ._graph import leaves
from ._report import Told, learning_rate
from ._retry import Replay, total
from ._track import Track
from ._window import Window


class GradScaler(DropIn):
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
    | `process_group` | agree with its ranks, in one small collective a step; None: DTensors agree \
over their own mesh, others communicate nothing |
    | `sharded` | True if only this rank holds its parameters (a pipeline stage); or a function of \
a parameter: True, False (every rank holds it), None (another rank counts it) |
    | `journal` | a `Journal` or its path; `sample_every` adds statistics by parameter |
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
                self._dropping.expect(leaves(outputs))
            self._settle()
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
        if not track.calls:  # a rank may step without ever having scaled a loss
            self._settle()
        window = track.window(optimizer)
        if window.stepped or window.deferred:
            raise MisuseError(
                f"{call} was called after step() on this optimizer: call scaler.update() first, "
                "once an iteration"
            )
        try:
            return track, track.inspect(window, norm=norm)
        except MisuseError:
            if window.reading is None:
                del track.windows[id(optimizer)]
            raise

    def _clipped(
        self, optimizer: Any, key: str | None, max_norm: float | None
    ) -> tuple[Track, Window]:
        if max_norm is None:
            return self._inspected(optimizer, key, "step()")
        _checked(max_norm)
        track, window = self._inspected(optimizer, key, "step()", norm=True)
        track.clip(window, max_norm)
        return track, window

    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        """Takes the scale out of the gradients, so that they can be looked at or clipped by hand.

        Calling it again in the same window does nothing. `clip_grad_norm_` is faster.
        """
        if self._active:
            track, window = self._inspected(optimizer, key, "unscale_()")
            self._report.begin(track, window)  # samples are of the gradients as scaled
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
        if not self._active:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, _checked(max_norm))
        _checked(max_norm)
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
        closure = kwargs.get("closure") or (args[0] if args and callable(args[0]) else None)
        if closure is not None and self._active:
            return self._closure_step(optimizer, closure, max_norm, key)
        if not self._active:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm)
            self.result = StepResult(Verdict.APPLY, Cause.NONE, 1.0)
            return optimizer.step(*args, **kwargs)
        if _takes_scaler(optimizer):
            kwargs["grad_scaler"] = self
        track, window = self._clipped(optimizer, key, max_norm)
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
        window.result = self.result = track.result(window, retries)
        if window.verdict is Verdict.HALT:
            before, step, result = track.numbers(), track.steps, self.result
            self._tell(self._end_window(track))
            raise self._report.halt(result, before, step)
        return value

    def _closure_step(
        self, optimizer: Any, closure: Callable[[], Any], max_norm: float | None, key: str | None
    ) -> Any:
        refuse(optimizer)
        if self._skip == "all":
            raise MisuseError(
                f"skip='all' cannot hold back a {type(optimizer).__name__}, which steps while it "
                "calls its closure: use skip='each'"
            )
        track = self._track(key, _home(optimizer))
        before, loss_so_far = Snapshot(optimizer), track.loss

        def guarded() -> Any:
            track.windows.pop(id(optimizer), None)
            track.loss = loss_so_far  # the last evaluation counts, not all of them
            with torch.enable_grad():
                loss = closure()
            window = track.inspect(track.window(optimizer), norm=max_norm is not None)
            if _is_bad(window.reading):
                raise _Overflow
            if max_norm is not None:
                track.clip(window, max_norm)
            inverse = 1.0 if window.unscaled else track.inverse()
            take_in(window, window.coefficient * inverse)
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
            self._set_scale(float(new_scale))
            return
        told = [self._end_window(track) for track in list(self._tracks.values())]
        for each in told:  # all is settled before anybody is told, and might raise
            self._tell(each)

    def _set_scale(self, scale: float) -> None:
        """By hand, for every key; what this window showed is not counted."""
        rule = with_scale_allowed(self._rule, scale)
        for track in self._tracks.values():
            self._carry_out_deferred(track)
            track.clear()
            track.put(track.numbers()._replace(scale=scale))
        self._use_rule(rule)

    def _end_window(self, track: Track) -> Told | None:
        """Moves the scale and begins a new window; what there is to tell of the old one."""
        if not any(w.reading is not None for w in track.windows.values()):
            return None
        reading = self._carry_out_deferred(track)
        results = [w.result for w in track.windows.values() if w.result is not None]
        loss = track.loss if track.calls else math.nan
        lr = learning_rate(track)
        track.advance(reading)
        self._report.inside(track)
        # Nothing to tell after unscale_() without step(); nothing to send if nobody listens.
        late, told = isinstance(track, DeviceTrack), None
        if results and (self._report.wanted or not late):
            facts = track.facts(reading, loss)
            told = Told(track.key, track.steps, results, facts, lr, late)
        track.steps += 1
        track.clear()
        return told

    def _tell(self, told: Told | None) -> None:
        if told is not None:
            (self._report.later if told.late else self._report.now)(told)

    def flush(self) -> None:
        """Tells what a device has not told yet: it is one step behind. `state_dict` does so too."""
        self._report.flush()

    def _carry_out_deferred(self, track: Track) -> Any:
        reading = track.combined()
        for window in track.windows.values():
            if window.deferred and not window.stepped:
                window.just_read = False
                self._finish(track, window, reading, window.deferred)
        return reading

    # a whole step

    def calibrate(
        self, closure: Callable[[], Any], *, model: torch.nn.Module, key: str | None = None
    ) -> float:
        """Finds the scale before the first step, on a batch that is not used up; returns it.

        `closure()` is that of `train_step`. It is computed and differentiated until the rule keeps
        its scale; then random states, `model`'s buffers and gradients are as they were, and no
        weight has moved. A rule that halves finds its way down only; "auto" finds it from anywhere.

        >>> model = torch.nn.Linear(4, 1)
        >>> scaler = GradScaler("cpu", rule="auto:init_scale=2^32")
        >>> def closure():
        ...     with torch.autocast("cpu", torch.float16):
        ...         return model(torch.ones(8, 4)).float().mean()
        >>> scaler.calibrate(closure, model=model) == scaler.get_scale() < 2**16
        True
        """
        return calibrate(self, closure, model, key) if self._active else 1.0

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

        With `retries`, "auto" is sharp, and computes the first batch again if a far larger scale
        fits it.

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
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisuseError(
                "train_step() computes the loss once, and LBFGS asks for it many times: call "
                "scaler.step(optimizer, closure), where the closure does backward as well"
            )
        if retries:
            self._sharpen()
        kept = Replay(model, optimizer) if retries and self._active else None
        sound = None  # a scale at which this batch was clean
        for tries in range(retries + 1):
            optimizer.zero_grad(set_to_none=True)
            self.scale(total(closure()), key=key).backward()
            if kept is None:
                self.step(optimizer, max_norm=max_norm, key=key)
                break
            track, window = self._clipped(optimizer, key, max_norm)
            self._finish(track, window, window.reading, ((), {}), retries - tries, tries)
            if window.verdict is not Verdict.RETRY:
                break
            if window.cause is Cause.CALIBRATION:
                sound = track.numbers().scale
            track.advance(track.combined(), retry=True)
            if sound is not None and window.cause is not Cause.CALIBRATION and retries - tries == 1:
                track.put(track.numbers()._replace(scale=sound))  # the last try must not be lost
            self._report.event(track.key, track.steps, self._result, track.numbers().scale)
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
    def accumulate(self, *, drop_bad: bool = False, key: str | None = None) -> Iterator[DropBad]:
        """With `drop_bad`, a bad micro-batch is left out instead of spoiling the whole window.

        Each is kept in a side buffer until it is known to be clean. Costs one more copy of the
        gradients, and a walk of the graph, one read and one addition a micro-batch. The sum is
        over the clean ones: if you divide each loss by their number, a window with one of four
        left out has three quarters of its usual length; `kept` and `dropped` tell. An overflow
        that was left out still lowers the scale.

        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> scaler = GradScaler("cpu", init_scale=1.0)
        >>> with scaler.accumulate(drop_bad=True) as window:
        ...     for x in (1.0, 1e38, 2.0):
        ...         scaler.scale((w * x * x).sum()).backward()
        >>> window.dropped, w.grad
        ([1], tensor([5.]))
        """
        dropping = DropBad(lambda *said: self._track(key).agree_on_batch(*said))
        if drop_bad and self._sharded is not False:
            raise MisuseError(
                "drop_bad needs a scaled loss on every rank, micro-batch by micro-batch; with "
                "sharded= some have none: leave it out, and a bad window is skipped as a whole"
            )
        self._dropping = dropping if drop_bad and self._active else None
        try:
            yield dropping
            dropping.finish()
        finally:
            self._dropping = None
        if dropping.dropped:
            self._track(key).leave_out(dropping.dropped)


class _Overflow(Exception):
    """Leaves an optimizer's line search."""


def _checked(max_norm: float) -> float:
    if not max_norm > 0:
        raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
    return max_norm


def _home(optimizer: Any) -> torch.device | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            return p.device
    return None


def _is_bad(reading: Any) -> bool:
    return reading is not None and bool(reading.nonfinite or reading.loss_nonfinite)


def _takes_scaler(optimizer: Any) -> bool:
    return is_fused(optimizer) and "grad_scaler" in _arguments(type(optimizer).step)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)

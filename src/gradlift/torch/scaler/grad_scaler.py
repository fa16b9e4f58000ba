"""`GradScaler`: torch's own interface, with the core's rules, verdicts and journal behind it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core import (
    Cause,
    StepResult,
    Verdict,
    checked_max_norm,
    next_try,
    result_of,
    sharpened,
    verdict_of,
)
from ...errors import MisuseError, TrainingHalted, add_note
from ..gradient_source import gradients_of, refuse_nan
from ..uncompiled import uncompiled
from .accumulation import DropBad
from .checkpoint import load, save
from .graph import leaves
from .retrying import Replay, Snapshot, calibrate, total
from .scale import Scale
from .settings import with_scale_allowed
from .torch_names import TorchNames
from .window import Window


class GradScaler(TorchNames):
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
    | `journal` | a `Journal` or its path; `every` so many steps, statistics by parameter |
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

    def _begin(self) -> None:
        self._scales: dict[str | None, Scale] = {None: Scale(self._settings)}
        self._dropping: DropBad | None = None
        self._last: Window | StepResult | None = None
        self._handed = None

    def scale_of(self, key: str | None, device: torch.device | None = None) -> Scale:
        """A key's `Scale`, with its window; it moves to the device of its first loss or parameter.

        >>> GradScaler("cpu", init_scale=8.0).scale_of(None).numbers().scale
        8.0
        """
        scale = self._scales.get(key)
        if scale is None:
            scale = self._scales[key] = Scale(self._settings, key)
        if device is None or (device.type == "cpu" and not self._force_device_path):
            return scale
        if not scale.home.late:
            scale.move_to(device)
        return scale

    # scale

    @uncompiled
    def scale(self, outputs: Any, *, key: str | None = None) -> Any:
        """loss * scale; lists, tuples, dicts of losses one by one. `key` names one of several.

        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(torch.tensor(0.5))
        tensor(4.)
        """
        if not self.active:
            return outputs
        if isinstance(outputs, Tensor):
            if self._dropping is not None:
                self._dropping.micro_batch_done()
                self._dropping.expect(leaves(outputs))
            if self._handed is not None:
                self._handed.sync()
            return self.scale_of(key, outputs.device).scaled(outputs)
        if isinstance(outputs, Mapping):
            return {name: self.scale(x, key=key) for name, x in outputs.items()}
        if isinstance(outputs, (list, tuple)):
            scaled = [self.scale(x, key=key) for x in outputs]
            named = hasattr(outputs, "_fields")  # a NamedTuple
            return type(outputs)(*scaled) if named else type(outputs)(scaled)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            return (self.scale(x, key=key) for x in outputs)
        raise MisuseError(
            f"scale() wants a tensor or an iterable of tensors, this is {type(outputs).__name__}"
        )

    @uncompiled
    def get_scale(self, key: str | None = None) -> float:
        """The scale of the next step; 1.0 if disabled.

        Whoever asks in a window may scale by hand, so that `step` wants no `scale(loss)` then.
        """
        if not self.active:
            return 1.0
        self._settings.by_hand = True
        if self._handed is not None:
            self._handed.sync()
        scale = self._scales.get(key)
        return float((scale.numbers() if scale else self.rule.init()).scale)

    # inspect, unscale, clip

    def _inspected(
        self, optimizer: Any, key: str | None, call: str, max_norm: float | None = None
    ) -> tuple[Scale, Window]:
        """An optimizer's window, its gradients looked at."""
        clips = max_norm is not None and checked_max_norm(max_norm) > 0
        scale = self.scale_of(key, _checked_device(optimizer))
        handed, unscaled = None if key is not None else self._handed, False
        if handed is not None:
            unscaled = handed.read_stage(optimizer)
        window = scale.windows.get(id(optimizer))
        if window is not None and (window.finished is not None or window.deferred):
            raise MisuseError(
                f"{call} was called after step() on this optimizer: call scaler.update() first, "
                "once an iteration"
            )
        scale.call = call
        window = scale.inspect(optimizer, norm=clips, unscaled=unscaled)
        if handed is not None:
            handed.take(window)
            handed.show(window)
        return scale, window

    @uncompiled
    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        """Takes the scale out of the gradients, so that they can be looked at or clipped by hand.

        Calling it again in the same window does nothing. `clip_grad_norm_` is faster.
        """
        if self.active:
            if self._overridden and key is None:
                self._unscale_as_torch(optimizer)
            scale, window = self._inspected(optimizer, key, "unscale_()")
            if not window.unscaled:
                window.source.multiply(scale.home.inverse())
                window.unscaled = True
            window.source.note()
            if self._handed is not None and key is None:
                self._handed.show(window)

    @uncompiled
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
        if not self.active:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, checked_max_norm(max_norm))
        scale, window = self._inspected(optimizer, key, "clip_grad_norm_()", max_norm)
        window.source.note()
        return scale.home.clip(window, max_norm)

    # step

    @uncompiled
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
        if closure is not None and self.active:
            return self._closure_step(optimizer, closure, max_norm, key)
        if not self.active:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm)
            self._last = StepResult(Verdict.APPLY, Cause.NONE, 1.0)
            return optimizer.step(*args, **kwargs)
        if self._overridden and key is None:
            return self._step_as_torch(optimizer, args, kwargs, max_norm)
        scale, window = self._inspected(optimizer, key, "step()", max_norm)
        step = getattr(type(optimizer), "step", None)
        if step is not None and "grad_scaler" in _arguments(step) and window.source.folds:
            kwargs["grad_scaler"] = self
        if max_norm is not None:
            scale.home.clip(window, max_norm)
        if self._skip == "all":
            window.deferred = (args, kwargs)
            window.source.note()
            return None
        value = scale.finish(window, (args, kwargs))
        self._stepped(scale, window)
        return value

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """For subclasses: torch's name for the part of `step` that applies it or does not."""
        scale, window = self._inspected(optimizer, None, "step()")
        return scale.finish(window, (args, kwargs))

    def _stepped(self, scale: Scale, window: Window) -> None:
        """After an optimizer's step; a halt ends the window at once, as nothing is waited for."""
        self._last = window
        if self._handed is not None and scale.key is None:
            self._handed.show(window)
        if window.verdict is Verdict.HALT:
            ended = scale.end()
            self.flush()
            scale.conclude(ended() if callable(ended) else ended)

    def _closure_step(
        self, optimizer: Any, closure: Callable[[], Any], max_norm: float | None, key: str | None
    ) -> Any:
        device = _checked_device(optimizer)
        if self._skip == "all":
            raise MisuseError(
                f"skip='all' cannot hold back a {type(optimizer).__name__}, which steps while it "
                "calls its closure: use skip='each'"
            )
        refuse_nan(optimizer)
        scale = self.scale_of(key, device)
        before, loss_so_far = Snapshot(optimizer), scale.loss

        def guarded() -> Any:
            scale.windows.pop(id(optimizer), None)
            scale.loss = loss_so_far  # the last evaluation counts, not all of them
            with torch.enable_grad():
                loss = closure()
            window = scale.inspect(optimizer, norm=max_norm is not None)
            if _is_bad(window.reading):
                raise _Overflow
            if max_norm is not None:
                scale.home.clip(window, max_norm)
            inverse = 1.0 if window.unscaled else scale.home.inverse()
            window.source.multiply(window.coefficient * inverse)
            return loss

        value = None
        try:
            value = gradients_of(optimizer).plain_step(guarded)
        except _Overflow:
            pass
        except BaseException as error:
            before.restore()
            scale.windows.pop(id(optimizer), None)
            add_note(
                error,
                f"gradlift: {type(optimizer).__name__}.step() raised this; its weights and state "
                "are as they were before, and step() may be called again",
            )
            raise
        window = scale.windows.get(id(optimizer))
        if window is None:
            raise MisuseError(
                f"{type(optimizer).__name__}.step() never called its closure: pass a closure that "
                "calls scaler.scale(loss).backward() and returns the loss"
            )
        if _is_bad(window.reading):
            before.restore()
            optimizer.zero_grad()
        scale.finish(window, done=True)
        self._stepped(scale, window)
        return value

    # update

    @uncompiled
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale (of every key) by what the steps since the last update showed.

        `new_scale` sets it by hand. Without a step in between there is nothing to do.
        """
        if not self.active:
            return
        if self._handed is not None:
            self._handed.before_update()
        if new_scale is not None:
            self._set_scale(float(new_scale))
            if self._handed is not None:
                self._handed.begin()
            return
        if self._skip == "all":
            for scale in self._scales.values():
                self._last = scale.carry_out_deferred() or self._last
        ended = list(map(Scale.end, self._scales.values()))
        if self._handed is not None:
            self._handed.begin()
        try:  # all scales have moved before a limit may raise
            for scale, window in zip(self._scales.values(), ended):
                scale.conclude(window)
        except TrainingHalted:
            with contextlib.suppress(TrainingHalted):  # what a device has sent is recorded too
                self.flush()
            raise

    def _set_scale(self, new_scale: float) -> None:
        """By hand, for every key; what this window showed is not counted."""
        rule = with_scale_allowed(self.rule, new_scale)
        for scale in self._scales.values():
            scale.carry_out_deferred()
            scale.clear()
            scale.put(scale.numbers()._replace(scale=new_scale))
        self._settings.by_hand = False
        self.use_rule(rule)

    def flush(self) -> None:
        """Concludes what a device has not sent yet: it is one step behind. `state_dict` does so
        too."""
        for scale in self._scales.values():
            due, scale.due = scale.due, None
            scale.conclude(None if due is None else due())

    # what happened

    @property
    @uncompiled
    def result(self) -> StepResult | None:
        """What the last step came to; None before the first. On a device this reads it."""
        if isinstance(self._last, Window):
            window, limits = self._last, self._settings.limits
            done = window.finished() if callable(window.finished) else window.finished
            assert done is not None
            if not window.norm_shown:
                done = done._replace(reading=done.reading._replace(norm=math.nan))
            verdict = window.verdict or verdict_of(done.cause, int(done.before.skips), limits)
            self._last = result_of(done, verdict)
        return self._last

    @property
    def skipped_steps(self) -> int:
        """Steps that had something to apply and were not applied, of all keys."""
        return sum(scale.home.skipped for scale in self._scales.values())

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied in a row, the most of any key."""
        return max(int(scale.numbers().skips) for scale in self._scales.values())

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
        return calibrate(self, closure, model, key) if self.active else 1.0

    @uncompiled
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
        kept = Replay(model, optimizer) if retries and self.active else None
        clean_at = 0.0  # a scale at which this batch was clean, if there is one
        for left in range(retries, -1, -1):
            optimizer.zero_grad(set_to_none=True)
            self.scale(total(closure()), key=key).backward()
            if kept is None:
                self.step(optimizer, max_norm=max_norm, key=key)
                break
            scale, window = self._inspected(optimizer, key, "step()", max_norm)
            if max_norm is not None:
                scale.home.clip(window, max_norm)
            scale.finish(window, retries_left=left, retries=retries - left)
            self._stepped(scale, window)
            if window.verdict is not Verdict.RETRY:
                break
            clean_at = self._retry(scale, window, clean_at, left)
            kept.restore()
        self.update()
        result = self.result
        assert result is not None
        if not result.stepped:
            optimizer.zero_grad(set_to_none=True)
        elif scheduler is not None:
            scheduler.step()
        return result

    def _retry(self, scale: Scale, window: Window, clean_at: float, retries_left: int) -> float:
        """Moves the scale for another try of the same batch."""
        result, before = self.result, scale.numbers()
        scale.advance(scale.combined(), retry=True)
        assert result is not None
        larger = result.cause is Cause.CALIBRATION
        after, clean_at = next_try(before, scale.numbers(), larger, clean_at, retries_left)
        scale.put(after)
        finished = window.finished() if callable(window.finished) else window.finished
        assert finished is not None
        self._settings.channel.retry(finished._replace(next_scale=float(after.scale)), result)
        scale.clear()
        return clean_at

    def _sharpen(self) -> None:
        """Batches are retried from now on, so "auto" keeps less headroom."""
        settings = self._settings
        if settings.sharp is None:
            return
        for scale in self._scales.values():
            scale.put(sharpened(settings.rule, settings.sharp, scale.numbers()))
        settings.use_rule(settings.sharp)
        settings.sharp, settings.replicas = None, 1

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
        scale = self.scale_of(key)
        dropping = DropBad(scale.agree_on_batch, lambda: len(scale.micro))
        if drop_bad and self._settings.sharded is not False:
            raise MisuseError(
                "drop_bad needs a scaled loss on every rank, micro-batch by micro-batch; with "
                "sharded= some have none: leave it out, and a bad window is skipped as a whole"
            )
        self._dropping = dropping if drop_bad and self.active else None
        try:
            yield dropping
            dropping.finish()
        finally:
            self._dropping = None
        if dropping.dropped:
            scale.drop(dropping)

    def join(self, model: Any, **how: Any) -> contextlib.AbstractContextManager[None]:
        """`with model.join():` for a scaler with a process group: ranks may have different numbers
        of batches. A rank that has none left stands in for its part of the collectives.

        At the end all ranks have the weights and the scaler's state of the last one; an optimizer's
        state is each rank's own. `how` is that of `DistributedDataParallel.join`.
        """
        from ..ranks.joining import joined

        return joined(self, model, **how)

    def join_hook(self, **_: Any) -> Any:
        """Says how a scaler takes part in torch's `Join`."""
        raise MisuseError("Join([model, scaler]) is written `with scaler.join(model):`")

    # saving

    def state_dict(self) -> dict[str, Any]:
        """Torch's five keys, and one more, "gradlift"; JSON-able. Empty if disabled."""
        return save(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what torch's scaler or any gradlift adapter saved; damage is refused and changes
        nothing. The current window is discarded: call it between update() and the next scale()."""
        if self._enabled:
            if self._handed is not None:
                self._handed.sync()
            load(self, state_dict)
            if self._handed is not None:
                self._handed.begin()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the state; journal, callback and process group stay here."""
        if any(scale.windows for scale in self._scales.values()):
            raise MisuseError(
                "a GradScaler can be copied or pickled between update() and the next step() only"
            )
        state = {**self.__dict__, "_saved": self.state_dict()}
        for name in ("_scales", "_dropping", "_last", "_handed"):
            del state[name]
        return {**state, "_settings": self._settings.copied()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._settings = self._settings.copied()
        self._begin()
        self.load_state_dict(saved)


class _Overflow(Exception):
    """Leaves an optimizer's line search."""


def _checked_device(optimizer: Any) -> torch.device | None:
    """The device of an optimizer's parameters; optimizers that cannot be guarded are refused."""
    name = type(optimizer).__name__
    if name == "CPUOffloadOptimizer":
        raise MisuseError(
            f"GradScaler cannot guard a {name}: it steps while backward is still running, before "
            "anyone could check"
        )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise MisuseError(
            f"step() wants an optimizer, this is a {name}: call scaler.step(optimizer)"
        )
    device = None
    for group in groups:
        if group["params"]:
            first = group["params"][0]
            device = device or first.device
            if "_in_backward_optimizers" in vars(first):
                raise MisuseError(
                    "these parameters are stepped by an optimizer inside backward(), before anyone "
                    "could check their gradients: step them after backward() to use a GradScaler"
                )
    return device


def _is_bad(reading: Any) -> bool:
    return reading is not None and bool(reading.nonfinite or reading.loss_nonfinite)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)

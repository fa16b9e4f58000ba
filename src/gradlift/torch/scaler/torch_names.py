"""Names that torch's scaler keeps for itself, and that trainers, samplers and subclasses use.

    _scale, _growth_tracker, _init_scale, ...     read and written
    _per_optimizer_states, _found_inf_per_device  whether gradients were non-finite, by optimizer
    unscale_, _unscale_grads_, _maybe_opt_step    overridden: torch's own step() then calls them

What was handed out is read again by `scale`, `unscale_`, `step` and `update`. A scaler of which
nobody has asked for any of these names does nothing for them.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ...errors import MisuseError
from ...journal import recorder
from ...namespace import namespace
from ...reading import Reading
from ...rules import Backoff
from ..names import culprits
from .scale import Scale
from .settings import DropIn, with_scale_allowed
from .window import Window

_PARTS_OF_STEP = ("unscale_", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device")


def _not_looked_at() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class Flag(NamedTuple):
    """`found_inf` as it was handed out."""

    tensor: Tensor
    version: int
    reading: Reading
    """What it shows."""
    window: Callable[[], Window | None]


class HandedOut:
    """Tensors and dicts that somebody holds; what is written to them counts.

    On a device `_scale` and `_growth_tracker` are the state itself; on the host they show it.
    """

    def __init__(self, scaler: TorchNames) -> None:
        self.scaler = scaler
        self.tensors: tuple[Tensor, Tensor] | None = None
        """`_scale` and `_growth_tracker` of a state in numbers."""
        self.stand_for: tuple[Any, Any] = (None, None)
        """The numbers that they were made from,"""
        self.shown: tuple[Any, Any] = (None, None)
        """and the same as float32 and int32."""
        self.states: dict[int, dict[str, Any]] = defaultdict(_not_looked_at)
        self.flags: dict[int, Flag] = {}
        """By optimizer."""
        for window in self.scale.windows.values():
            self.show(window)

    @property
    def scale(self) -> Scale:
        return self.scaler._scales[None]

    # _scale and _growth_tracker

    def sync(self) -> None:
        """What was written there becomes the state; else they show the state."""
        home = self.scale.home
        if home.late or self.tensors is None:
            return
        now = self.tensors[0].item(), self.tensors[1].item()
        try:
            if now != self.shown:
                self.write(*now)
        finally:  # a scale that is refused is not kept
            state = home.state
            if now != self.shown or (state.scale, state.clean) != self.stand_for:
                self.tensors[0].fill_(state.scale)
                self.tensors[1].fill_(state.clean)
                self._look()

    def _look(self) -> None:
        assert self.tensors is not None
        state = self.scale.home.state
        self.stand_for = state.scale, state.clean
        self.shown = self.tensors[0].item(), self.tensors[1].item()

    def write(self, scale: float, clean: float) -> None:
        """The state by hand; in mid-window too, as torch has it."""
        state, allowed = self.scale.numbers(), self.scaler.rule
        if scale != state.scale:
            allowed = with_scale_allowed(allowed, scale, "_scale")
        self.scale.put(state._replace(scale=scale, clean=int(clean)))
        if allowed is not self.scaler.rule:
            self.scaler.use_rule(allowed)

    def pair(self) -> tuple[Any, Any]:
        """`_scale` and `_growth_tracker`."""
        home = self.scale.home
        if home.late:
            self.tensors = None
            return home.state.scale, home.state.clean
        if self.tensors is None:
            with torch.inference_mode(False):
                self.tensors = torch.zeros(()), torch.zeros((), dtype=torch.int32)
            self.tensors[0].fill_(home.state.scale)
            self.tensors[1].fill_(home.state.clean)
            self._look()
        self.sync()
        return self.tensors

    def assign(self, at: int, value: Any) -> None:
        """Another tensor, or a number, in place of `_scale` (0) or `_growth_tracker` (1)."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self.scaler.scale_of(None, value.device)
        held = self.pair()[at]
        if at == 0 and not (isinstance(value, Tensor) and value.device.type != "cpu"):
            with_scale_allowed(self.scaler.rule, float(value), "_scale")
        if self.tensors is None or not isinstance(value, Tensor) or value.numel() != 1:
            held.fill_(value)
        else:
            pair = list(self.tensors)
            pair[at] = value.detach()  # the caller's own, who may write to it again
            self.tensors = pair[0], pair[1]
        self.sync()

    # found_inf and stage, by optimizer

    def read_stage(self, optimizer: Any) -> bool:
        """Has somebody else's code unscaled the gradients? A stage that was put back to READY
        discards what was known of them."""
        state = self.states.get(id(optimizer))
        window = self.scale.windows.get(id(optimizer))
        if state is None:
            return False
        stage = state["stage"]
        if window is None:
            if stage is OptState.STEPPED:
                self.forget(optimizer)
            return stage is OptState.UNSCALED
        done = window.unscaled or window.finished is not None or window.deferred is not None
        if (stage is OptState.READY and done) or (
            stage is OptState.UNSCALED and not window.unscaled and window.finished is None
        ):
            del self.scale.windows[id(optimizer)]
            self.flags.pop(id(optimizer), None)
            if stage is OptState.READY:
                state["found_inf_per_device"] = {}
        return stage is OptState.UNSCALED

    def forget(self, optimizer: Any) -> None:
        self.states.pop(id(optimizer), None)
        self.flags.pop(id(optimizer), None)

    def show(self, window: Window) -> None:
        """What a look, or a step, has found."""
        key, reading = id(window.source.optimizer), window.reading
        state, ours = self._of(window)
        if window.finished is not None or window.deferred is not None:
            state["stage"] = OptState.STEPPED
        elif window.unscaled:
            state["stage"] = OptState.UNSCALED
        given = state["found_inf_per_device"]
        if reading is None or (given if ours is None else ours.reading is reading):
            return
        bad = namespace(self.scale.home.xp).or_(reading.nonfinite, reading.loss_nonfinite)
        device = self.scale.home.device
        with torch.inference_mode(False):
            flag = torch.zeros((), device=device) if ours is None else ours.tensor
            if isinstance(bad, Tensor):
                flag.copy_(bad)
            else:
                flag.fill_(bad)
        if ours is None:
            given[device] = flag
        self.flags[key] = Flag(flag, flag._version, reading, weakref.ref(window))

    def _of(self, window: Window) -> tuple[dict[str, Any], Flag | None]:
        """What is known of its optimizer, unless it is of a window that was discarded."""
        key = id(window.source.optimizer)
        ours = self.flags.get(key)
        if ours is not None and ours.window() is not window:
            self.forget(window.source.optimizer)
            ours = None
        return self.states[key], ours

    def take(self, window: Window) -> None:
        """What was written to `found_inf`. 0 in place of 1 is believed if the gradients are finite
        now; after the step it counts for the scale only."""
        reading = window.reading
        state, ours = self._of(window)
        given = list(state["found_inf_per_device"].values())
        if reading is None or not given:
            return
        if not self.scale.home.late:
            bad = any(bool(flag.any()) for flag in given)
            known = ours is not None and _is_bad(ours.reading)
            if bad == known or (bad and _is_bad(reading)):  # nothing new
                return
            still = not bad and window.finished is None and self._again(window)
            window.reading = reading._replace(
                nonfinite=bad or still, loss_nonfinite=False, checked=True
            )
            window.norm = math.nan if bad else window.norm
            window.culprits = window.culprits if still else ()
        else:
            self._take_on_device(window, given, ours)
        self.show(window)

    def _take_on_device(self, window: Window, given: list[Tensor], ours: Flag | None) -> None:
        """The same without waiting for a value: a flag that was written to may have been lowered,
        so the gradients are looked at again."""
        reading, device = window.reading, self.scale.home.device
        assert reading is not None
        flags = [flag.to(device, non_blocking=True).ne(0).any() for flag in given]
        bad = torch.stack(flags).any()
        own: Any = reading.nonfinite
        written = ours is not None and (
            given[0] is not ours.tensor or given[0]._version != ours.version
        )
        if written:
            own = self._again(window) if window.finished is None else False
        window.reading = reading._replace(
            nonfinite=namespace(torch).or_(bad, own),
            loss_nonfinite=namespace(torch).and_(reading.loss_nonfinite, bad),
            checked=True,
        )

    def _again(self, window: Window) -> Any:
        """Are gradients non-finite now?"""
        source = window.source
        if not source.elements:
            return False
        bad = self.scale.home.look_again(window, list(range(len(source.elements))))
        if not self.scale.home.late and bad:
            names = self.scale.settings.names
            window.culprits = culprits(source.params, names, source.each())
        return bad

    # windows

    def before_update(self) -> None:
        self.sync()
        for window in self.scale.windows.values():
            self.take(window)

    def begin(self) -> None:
        """A new window."""
        self.sync()
        self.states, self.flags = defaultdict(_not_looked_at), {}

    def end_by_hand(self, states: dict[int, dict[str, Any]]) -> None:
        """A subclass has moved `_scale` itself and puts new states: the window is over."""
        if self.scale.windows:
            scale, clean = self.pair_as_written()
            ended = self.scale.end(by_hand=(scale, clean))
            self.begin()
            self.scale.conclude(ended)
        self.states, self.flags = states, {}

    def pair_as_written(self) -> tuple[Any, Any]:
        home = self.scale.home
        if home.late:
            return home.state.scale.clone(), home.state.clean.clone()
        if self.tensors is None:
            return home.state.scale, home.state.clean
        scale, clean = self.tensors[0].item(), self.tensors[1].item()
        self.scaler.use_rule(with_scale_allowed(self.scaler.rule, scale, "_scale"))
        self.shown = scale, clean
        return scale, int(clean)


class TorchNames(DropIn):
    """torch's private names, with torch's meaning."""

    _handed: HandedOut | None = None
    _overridden: frozenset[str] = frozenset()
    """Parts of torch's step() that a subclass has its own of."""
    scale_of: Callable[..., Scale]
    _inspected: Callable[..., tuple[Scale, Window]]
    _stepped: Callable[[Scale, Window], None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._overridden = frozenset(
            name
            for name in _PARTS_OF_STEP
            if _package_of(getattr(cls, name)) not in ("gradlift", "torch")
        )

    def _hand_out(self) -> HandedOut:
        self._handed = self._handed or HandedOut(self)
        return self._handed

    # the scale

    @property
    def _scale(self) -> Tensor | None:
        """None before the first loss. Who reads it may scale by hand, as with `get_scale`."""
        self._settings.by_hand = True
        return self._hand_out().pair()[0] if self._scales[None].begun else None

    @_scale.setter
    def _scale(self, value: Any) -> None:
        scale = self._scales[None]
        scale.begun = value is not None
        if value is None:
            scale.put(self.rule.init())
        else:
            self._hand_out().assign(0, value)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._hand_out().pair()[1] if self._scales[None].begun else None

    @_growth_tracker.setter
    def _growth_tracker(self, value: Any) -> None:
        if value is not None:
            self._hand_out().assign(1, value)

    @property
    def _init_scale(self) -> float:
        """The scale before the first loss."""
        scale = self._scales[None]
        return float((self.rule.init() if scale.begun else scale.numbers()).scale)

    @_init_scale.setter
    def _init_scale(self, value: Any) -> None:
        scale, value = self._scales[None], float(value)
        rule = with_scale_allowed(self.rule, value, "_init_scale")
        if isinstance(rule, Backoff):
            rule = dataclasses.replace(rule, init_scale=value)
        if not scale.begun:
            scale.put(scale.numbers()._replace(scale=value))
        self.use_rule(rule)

    @property
    def _init_growth_tracker(self) -> int:
        scale = self._scales[None]
        return 0 if scale.begun else int(scale.numbers().clean)

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: Any) -> None:
        scale = self._scales[None]
        if not scale.begun:
            scale.put(scale.numbers()._replace(clean=int(value)))

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        if self._scales[None].begun:
            raise MisuseError("_lazy_init_scale_growth_tracker() was called after scale()")
        self.scale_of(None, torch.device(dev)).begun = True
        self._settings.by_hand = True

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        if self._handed is not None:
            self._handed.sync()
        return int(self._scales[None].numbers().clean) if self.active else 0

    # factors

    @property
    def _growth_factor(self) -> float:
        return self.get_growth_factor()

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self.set_growth_factor(value)

    @property
    def _backoff_factor(self) -> float:
        return self.get_backoff_factor()

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self.set_backoff_factor(value)

    @property
    def _growth_interval(self) -> int:
        return self.get_growth_interval()

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self.set_growth_interval(value)

    # what was found, by optimizer

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:
        return self._hand_out().states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: dict[int, dict[str, Any]]) -> None:
        self._hand_out().end_by_hand(states)

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        return self._hand_out().states[id(optimizer)]["found_inf_per_device"]

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        handed = self._hand_out()
        if "_unscale_grads_" in self._overridden:
            super()._check_inf_per_device(optimizer)
        window = self._scales[None].inspect(optimizer)
        window.source.note()
        handed.take(window)
        handed.show(window)
        return self._found_inf_per_device(optimizer)

    # a subclass with parts of its own

    def _unscale_as_torch(self, optimizer: Any) -> None:
        """Lets the subclass' `_unscale_grads_` take the scale out, as torch's `unscale_` does."""
        ready = self._hand_out().states[id(optimizer)]["stage"] is OptState.READY
        if "_unscale_grads_" in self._overridden and ready:
            super().unscale_(optimizer)

    def _step_as_torch(
        self, optimizer: Any, args: Any, kwargs: dict[str, Any], max_norm: float | None
    ) -> Any:
        """torch's own step(): it calls what the subclass overrides, and ours for the rest."""
        if self._skip == "all":
            raise MisuseError(
                f"skip='all' cannot hold back {type(self).__name__}, which overrides "
                f"{', '.join(sorted(self._overridden))}: use skip='each'"
            )
        handed, stepped = self._hand_out(), [False]
        if max_norm is not None:
            self.unscale_(optimizer)
            scale, window = self._inspected(optimizer, None, "step()", max_norm)
            scale.home.clip(window, max_norm)
            window.source.multiply(window.coefficient)
            window.coefficient = 1.0
            window.source.note()

        def after(*_: Any) -> None:
            stepped[0] = True

        register = getattr(optimizer, "register_step_post_hook", None)
        hook = register(after) if register else None
        recorder.depth += 1
        try:
            value = super().step(optimizer, *args, **kwargs)
        finally:
            recorder.depth -= 1
            if hook is not None:
                hook.remove()
        scale = self._scales[None]
        window = scale.windows.get(id(optimizer))
        if window is None:
            window = scale.inspect(optimizer, unscaled=True)
        if window.finished is None:  # `_maybe_opt_step` is the subclass' own
            handed.take(window)
            if hook is not None and not stepped[0] and window.reading is not None:
                window.reading = window.reading._replace(nonfinite=True, checked=True)
            scale.finish(window, done=True)
        self._stepped(scale, window)
        return value


def _is_bad(reading: Reading) -> bool:
    return bool(reading.nonfinite or reading.loss_nonfinite)


def _package_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]

"""What makes the scaler a drop-in: torch's own rule, torch's accessors, copies and pickles."""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MisuseError, SettingsError
from ..journal import Event, JournalLike, opened
from ..rules import Backoff, Headroom, Off, Rule, parse
from ..rules._presets import cautious
from ..rules._rule import LARGEST, is_power_of_two
from ..verdict import Limits, StepResult
from ._accumulate import DropBad
from ._agree import world_size
from ._circle import Sharded, remembered, resolved
from ._device import DeviceTrack
from ._names import Names, named
from ._report import Report
from ._shards import distributed
from ._state import load, save
from ._sync import assert_in_sync
from ._track import Track


def torch_rule(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float | None,
) -> Backoff:
    """The rule of `torch.amp.GradScaler`, within bounds; what torch accepts is accepted."""
    if not growth_factor > 1.0:
        raise SettingsError(f"growth_factor is {growth_factor!r}, expected more than 1")
    if not 0.0 < backoff_factor < 1.0:
        raise SettingsError(f"backoff_factor is {backoff_factor!r}, expected a number in (0, 1)")
    if not (math.isfinite(init_scale) and init_scale > 0):
        raise SettingsError(f"init_scale is {init_scale!r}, expected a finite number above 0")
    high = LARGEST if max_scale is None else max_scale
    odd = [
        f"{name}={value!r}"
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
        )
        if not is_power_of_two(value)
    ]
    if odd:
        warnings.warn(
            f"{', '.join(odd)}: not a power of two, so every gradient is rounded once more when "
            "it is unscaled",
            stacklevel=3,
        )
    if not min_scale <= init_scale <= high:
        warnings.warn(
            f"init_scale is {init_scale!r}, outside [{min_scale:g}, {high:g}]: the nearest bound "
            "is used",
            stacklevel=3,
        )
    return Backoff(
        init_scale=min(max(init_scale, min_scale), high),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=high,
        powers_of_two=not odd,
    )


def with_scale_allowed(rule: Rule, scale: float) -> Rule:
    """The rule, ready for a scale set by hand; or an error if it cannot have that scale."""
    if not (math.isfinite(scale) and rule.min_scale <= scale <= rule.max_scale):
        raise SettingsError(
            f"new_scale is {scale!r}, expected a number in [{rule.min_scale:g}, {rule.max_scale:g}]"
        )
    if is_power_of_two(scale) or not rule._powers_only:
        return rule
    if isinstance(rule, Backoff):
        return dataclasses.replace(rule, powers_of_two=False)
    raise SettingsError(f"new_scale is {scale!r}: the rule {rule.name!r} needs a power of two")


def _nobody() -> None:
    """There are no other ranks."""


def _never() -> Any:
    return _never  # equal to no group, and not None either


_NEVER = _never


class DropIn(torch.amp.GradScaler):
    """Settings and state of a `GradScaler`, and torch's accessors to them."""

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
        sharded: Sharded = False,
        journal: JournalLike | None = None,
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
        theirs = init_scale, *factors, min_scale, max_scale
        if rule is not None and theirs != (2.0**16, 2.0, 0.5, 2000, 2.0**-24, None):
            raise SettingsError(
                f"with rule={str(rule)!r}, scale, factors, interval and bounds belong into the "
                "rule: write rule='dynamic:init_scale=2^8', not init_scale="
            )
        self._torch_rule = rule is None
        self._rule: Rule = (
            torch_rule(init_scale, *factors, min_scale, max_scale) if rule is None else parse(rule)
        )
        self._sharp: Rule | None = None
        if isinstance(rule, str) and (gentle := cautious(rule)):
            self._sharp, self._rule = self._rule, gentle
        self._replicas = 1  # what the rule was told of
        self._settled: Any = _NEVER
        if not (isinstance(sharded, bool) or callable(sharded)):
            raise SettingsError(
                f"sharded is {sharded!r}, expected True, False or a function of a parameter"
            )
        self._arguments: list[Any] = list(factors)
        self._limits = Limits(max_consecutive_skips, on_floor)
        self._skip = skip
        self._group, self._sharded = remembered(process_group), sharded
        self._names = named(names)
        self._allow_fp16_params = allow_fp16_params
        self._report = Report(
            self._rule, self._limits, opened(journal), self._names, on_event, sample_every
        )
        self._force_device_path = False  # for tests: CPU tensors take the accelerator's path
        self._tracks: dict[str | None, Track] = {None: self._new_track(None)}
        self._dropping: DropBad | None = None
        self.result: StepResult | None = None
        """What the last step came to; valid until the next one."""

    def _new_track(self, key: str | None) -> Track:
        recorded = self._report.journal is not None
        return Track(
            self._rule,
            limits=self._limits,
            key=key,
            group=self._group,
            sharded=self._sharded,
            names=self._names,
            allow_fp16_params=self._allow_fp16_params,
            want_amax=self._rule.magnitudes or recorded,
            want_norm=recorded,
        )

    def _track(self, key: str | None, device: torch.device | None = None) -> Track:
        """The track of a key; it moves to the device where its first loss or parameter lies."""
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = self._new_track(key)
        if device is None or (device.type == "cpu" and not self._force_device_path):
            return track
        if not isinstance(track, DeviceTrack):
            track = self._tracks[key] = DeviceTrack.take(track, device)
        return track

    @property
    def _active(self) -> bool:
        return self._enabled and not isinstance(self._rule, Off)

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
        if not self._active:
            return 1.0
        track = self._tracks.get(key)
        return float((track.numbers() if track else self._rule.init()).scale)

    @property
    def _factors(self) -> list[Any]:
        """Growth factor, backoff factor and interval: the rule's, else as given."""
        if not isinstance(self._rule, Backoff):
            return self._arguments
        return [self._rule.growth_factor, self._rule.backoff_factor, self._rule.growth_interval]

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
        self._use_rule(rule)

    def _use_rule(self, rule: Rule) -> None:
        self._rule = self._report.rule = rule
        for track in self._tracks.values():
            track.rule = rule

    def _sharpen(self) -> None:
        """Batches are retried from now on, so "auto" may go nearer to the edge."""
        if self._sharp is None:
            return
        fresh = self._sharp.init()
        for track in self._tracks.values():
            state = track.numbers()
            if not self._rule.calibrated(state):  # nothing but the other rule's own start
                track.put(fresh._replace(scale=state.scale, skips=state.skips))
        self._use_rule(self._sharp)
        self._sharp, self._settled = None, _NEVER

    def _settle(self) -> None:
        """Ranks average their gradients: what is seen afterwards may have been that much larger.
        Asked for anew when the default group has been."""
        world = dist.group.WORLD if distributed() else None
        if self._settled() is world:
            return
        self._settled = _nobody if world is None else weakref.ref(world)
        ranks = max(world_size(resolved(self._group)), 1)
        if isinstance(self._rule, Headroom) and self._rule.replicas == self._replicas:
            self._replicas = ranks
            if self._rule.replicas != ranks:
                self._use_rule(dataclasses.replace(self._rule, replicas=ranks))

    @property
    def process_group(self) -> Any:
        """The ranks that decide together, None if nobody said. Set it between steps, when a group
        was destroyed and made again, or in a copy, which has none; the default group's successor
        is found without that."""
        return resolved(self._group)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group, self._settled = remembered(group), _NEVER
        for track in self._tracks.values():
            track.group = self._group

    def assert_in_sync(self, group: Any = None) -> None:
        """Raises `gradlift.errors.RankError` unless all ranks have the same rule, scales and
        counters, saying which rank has what.

        For when nothing else would notice: without `process_group=`, after a checkpoint was
        loaded, once an epoch. All ranks of `group` (default: the scaler's, else all there are)
        must call it. Alone it does nothing.

        >>> import gradlift.torch
        >>> gradlift.torch.GradScaler("cpu").assert_in_sync()
        """
        assert_in_sync(self, group)

    def _get_scale_async(self) -> Tensor | None:
        return self._track(None).scale_tensor()

    def _get_growth_tracker(self) -> int:
        return int(self._track(None).numbers().clean) if self._active else 0

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        track = self._track(None)
        track.inspect(track.window(optimizer))
        return self._found_inf_per_device(optimizer)

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
        said = self._sharded if isinstance(self._sharded, bool) else False
        return {**state, "_group": None, "_sharded": said, "_settled": None, "_names": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._settled = _NEVER
        self._report = Report(self._rule, self._limits, None, self._names, None, None)
        self._tracks = {None: self._new_track(None)}
        self._dropping = self.result = None
        self.load_state_dict(saved)

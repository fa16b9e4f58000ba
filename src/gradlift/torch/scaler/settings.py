"""What makes the scaler a drop-in: torch's own rule, torch's accessors, copies and pickles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ...core import NO_LIMITS, Limits
from ...errors import MisuseError, SettingsError, warn
from ...journal import Channel, Event, JournalLike, channel, current
from ...rules import Backoff, Headroom, Off, Rule, parse, resolve
from ...rules.base import LARGEST, is_power_of_two
from ..names import Names, name_apart, named
from ..ranks.agreement import assert_in_sync, world_size
from ..ranks.group import Sharded, remembered, resolved


@dataclasses.dataclass
class ScalerSettings:
    """What all scales of one `GradScaler` share."""

    rule: Rule
    limits: Limits
    channel: Channel
    group: Any = None
    """The process group that was named, None if none was."""
    sharded: Sharded = False
    known_names: dict[int, str] = dataclasses.field(default_factory=dict)
    """id(parameter) -> name, as the user gave them or as they were found."""
    allow_fp16_params: bool = False
    sharp: Rule | None = None
    """What "auto" becomes once batches are retried."""
    replicas: int = 1
    """The number of ranks that the rule was made for."""
    unnamed: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    """Optimizers whose parameters have no names yet, in the order of their first steps."""
    taken: dict[str, int] = dataclasses.field(default_factory=dict)
    """name -> id of the parameter that has it."""
    by_hand: bool = False
    """Was the scale asked for since the last update, so that somebody may scale by hand?"""

    def __post_init__(self) -> None:
        self.use_rule(self.rule)

    @property
    def names(self) -> dict[int, str]:
        """id(parameter) -> name, of all optimizers seen so far. Walks every object, so it is asked
        for only by a journal and by what went wrong; the names are the same whoever asks first."""
        unnamed, self.unnamed = self.unnamed, []
        for optimizer in filter(None, (held() for held in unnamed)):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            name_apart(params, self.known_names, self.taken)
        return self.known_names

    def use_rule(self, rule: Rule) -> None:
        self.rule = self.channel.rule = rule
        self.recorded = self.channel.recording
        self.watched = self.recorded and not self.channel.own_journal
        """Recorded only by a run around, which must not show in results and saved states?"""
        self.wants_amax = rule.magnitudes or self.recorded
        self.observed = self.channel.heard or self.limits != NO_LIMITS
        """Must a device send its numbers over, for a journal, a callback or the limits?"""
        self.known = self.channel.heard_by_user or self.limits != NO_LIMITS
        """Would it do so without a recorded run around?"""

    def use_replicas(self, ranks: int | None = None) -> None:
        """Ranks average their gradients: what is seen afterwards may have been that much larger.
        A number of replicas that the user gave is kept."""
        rule = self.rule
        if not isinstance(rule, Headroom) or rule.replicas != self.replicas:
            return
        if ranks is None:
            ranks = max(world_size(resolved(self.group)), 1)
        if ranks != self.replicas:
            self.replicas = ranks
            self.use_rule(dataclasses.replace(rule, replicas=ranks))

    def copied(self) -> ScalerSettings:
        """For a copy of the scaler: it has no journal, no callback and no process group."""
        return ScalerSettings(
            self.rule,
            self.limits,
            Channel("torch", self.rule),
            sharded=self.sharded if isinstance(self.sharded, bool) else False,
            allow_fp16_params=self.allow_fp16_params,
            sharp=self.sharp,
            replicas=self.replicas,
        )

    def stop_recording(self) -> None:
        """This rank keeps no journal of its own."""
        if self.recorded:
            self.channel.leave_own_journal()
            self.use_rule(self.rule)


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
        warn(
            f"{', '.join(odd)}: not a power of two, so every gradient is rounded once more when "
            "it is unscaled"
        )
    if not min_scale <= init_scale <= high:
        warn(
            f"init_scale is {init_scale!r}, outside [{min_scale:g}, {high:g}]: the nearest bound "
            "is used"
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


def with_scale_allowed(rule: Rule, scale: float, name: str = "new_scale") -> Rule:
    """The rule, ready for a scale set by hand; or an error if it cannot have that scale."""
    if not (math.isfinite(scale) and rule.min_scale <= scale <= rule.max_scale):
        raise SettingsError(
            f"{name} is {scale!r}, expected a number in [{rule.min_scale:g}, {rule.max_scale:g}]"
        )
    if is_power_of_two(scale) or not rule.powers_only:
        return rule
    if isinstance(rule, Backoff):
        return dataclasses.replace(rule, powers_of_two=False)
    raise SettingsError(f"{name} is {scale!r}: the rule {rule.name!r} needs a power of two")


def plain_number(value: Any) -> Any:
    """A NumPy number, or a tensor of one element, as Python's own; anything else as it is.

    >>> plain_number(torch.tensor(8.0)), plain_number("8")
    (8.0, '8')
    """
    numpys = type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if numpys or one else value


class DropIn(torch.amp.GradScaler):
    """Settings of a `GradScaler`, and torch's accessors to them."""

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
        every: int | None = None,
    ) -> None:
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warn("GradScaler is enabled, but CUDA is not available.  Disabling.")
            self._enabled = False
        if skip not in ("each", "all"):
            raise SettingsError(f"skip is {skip!r}, expected 'each' or 'all'")
        if not (isinstance(sharded, bool) or callable(sharded)):
            raise SettingsError(
                f"sharded is {sharded!r}, expected True, False or a function of a parameter"
            )
        recorder = current()
        if recorder is not None and recorder.rule is not None:  # gradlift run --rule
            rule, init_scale, min_scale, max_scale = recorder.rule, 2.0**16, 2.0**-24, None
            growth_factor, backoff_factor, growth_interval = 2.0, 0.5, 2000
        if not self._enabled:  # torch looks at none of these then
            init_scale, growth_factor, backoff_factor, growth_interval = 2.0**16, 2.0, 0.5, 2000
        init_scale = plain_number(init_scale)
        growth_factor, backoff_factor = plain_number(growth_factor), plain_number(backoff_factor)
        factors = growth_factor, backoff_factor, plain_number(growth_interval)
        theirs = init_scale, *factors, min_scale, max_scale
        if rule is not None and theirs != (2.0**16, 2.0, 0.5, 2000, 2.0**-24, None):
            raise SettingsError(
                f"with rule={str(rule)!r}, scale, factors, interval and bounds belong into the "
                "rule: write rule='dynamic:init_scale=2^8', not init_scale="
            )
        self._torch_rule = rule is None
        first = (
            torch_rule(init_scale, *factors, min_scale, max_scale)
            if rule is None
            else resolve(rule, retries=False)
        )
        sharp = parse(rule) if isinstance(rule, str) else first
        self._arguments: list[Any] = list(factors)
        self._skip = skip
        self._settings = ScalerSettings(
            first,
            Limits(max_consecutive_skips, on_floor),
            channel("torch", first, journal=journal, every=every, on_event=on_event),
            remembered(process_group),
            sharded,
            named(names),
            allow_fp16_params,
            None if sharp == first else sharp,
        )
        self._force_device_path = False  # for tests: CPU tensors take the accelerator's path
        self.active = self._enabled and not isinstance(first, Off)
        """Does it scale and check? Else everything passes through."""
        self._begin()

    _scales: dict[str | None, Any]

    def _begin(self) -> None:
        """Makes the scale that every scaler has."""
        raise NotImplementedError

    @property
    def rule(self) -> Rule:
        """The rule that moves the scale.

        >>> import gradlift.torch
        >>> print(gradlift.torch.GradScaler("cpu", rule="static:8").rule)
        static:8
        """
        return self._settings.rule

    def use_rule(self, rule: Rule) -> None:
        """From now on this rule moves the scale, which stays as it is.

        >>> import gradlift.torch
        >>> scaler = gradlift.torch.GradScaler("cpu", init_scale=8.0)
        >>> scaler.use_rule(gradlift.rules.parse("static:8"))
        >>> print(scaler.rule)
        static:8
        """
        self._settings.use_rule(rule)

    @property
    def events(self) -> list[Event]:
        """The last 64 skips, retries and halts."""
        return list(self._settings.channel.events)

    @property
    def _factors(self) -> list[Any]:
        """Growth factor, backoff factor and interval: the rule's, else as given."""
        rule = self.rule
        if not isinstance(rule, Backoff):
            return self._arguments
        return [rule.growth_factor, rule.backoff_factor, rule.growth_interval]

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
        if not isinstance(self.rule, Backoff):
            raise MisuseError(
                f"the rule {str(self.rule)!r} has no {', '.join(changes)}: pass a rule with the "
                "settings you want"
            )
        changes = {name: plain_number(value) for name, value in changes.items()}
        factors = [v for name, v in changes.items() if name != "growth_interval"]
        if any(v == 1 or not is_power_of_two(v) for v in factors):
            changes["powers_of_two"] = False
        self.use_rule(dataclasses.replace(self.rule, **changes))

    @property
    def process_group(self) -> Any:
        """The ranks that decide together, None if not given. Set it between steps, when a group
        was destroyed and made again, or in a copy, which has none; the default group's successor
        is found without that."""
        return resolved(self._settings.group)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._settings.group = remembered(group)

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

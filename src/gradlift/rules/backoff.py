"""The classic rule: lower the scale on overflow, raise it after a run of clean steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import SettingsError
from ..reading import Reading
from .base import Checked, Rule, ScaleState

_NEVER = 2**31 - 1
"""The most clean steps that a state of 32 bits can count."""


@dataclass(frozen=True)
class Backoff(Rule):
    """Multiplicative decrease on overflow, increase after `growth_interval` clean steps.

        overflow: clean <- 0;  left <- left - 1;  if left <= 0: scale <- scale * backoff_factor
        clean:    clean <- clean + 1
                  if clean = growth_interval: scale <- scale * growth_factor;  clean <- 0
        always:   scale within [min_scale, max_scale]

    | setting | meaning |
    |---|---|
    | `hysteresis` | overflows until the scale is lowered; 1 lowers it at once |
    | `hysteresis_refill` | refilled at `"growth"`, on every `"clean"` step, or (`"streak"`) also \
after each decrease |
    | `tolerance` | an overflow is tolerated while overflows / steps since the last change stay \
below this share |
    | `recover_below`, `recover_interval` | a shorter interval while scale <= `recover_below` |
    | `growth_late` | one more clean step, as some peers count, before the `"first"` growth after \
an overflow, or before `"every"` growth |
    | `powers_of_two` | False accepts any factor; each then rounds every gradient. It accepts 1, \
too, by which the scale never moves |

    >>> from gradlift import Reading
    >>> rule = Backoff(init_scale=8, growth_interval=2)
    >>> state = rule.init()
    >>> for overflow in (False, False, True):
    ...     state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
    ...     print(state.scale)
    8.0
    16.0
    8.0

    State, where `tolerance` is set: level counts overflows since the last decrease, seen counts
    steps since the last change of scale.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_refill: str = "growth"
    tolerance: float = 0.0
    recover_below: float | None = None
    recover_interval: int | None = None
    growth_late: str = "never"
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**40
    powers_of_two: bool = True

    name = "backoff"

    def __post_init__(self) -> None:
        check = Checked(self)
        check.choice("powers_of_two", True, False)
        check.bounds(power=self.powers_of_two)
        none = () if self.powers_of_two else (1,)
        growth = check.number("growth_factor", power=self.powers_of_two)
        if growth <= 1 and growth not in none:
            raise SettingsError(
                f"Backoff: growth_factor is {self.growth_factor!r}, expected more than 1"
            )
        backoff = check.number("backoff_factor", power=self.powers_of_two)
        if backoff >= 1 and backoff not in none:
            raise SettingsError(
                f"Backoff: backoff_factor is {self.backoff_factor!r}, expected a number in (0, 1)"
            )
        check.count("growth_interval", 1, bits=None)
        check.count("hysteresis", 1)
        check.choice("hysteresis_refill", "growth", "clean", "streak")
        check.choice("growth_late", "never", "first", "every")
        check.share("tolerance")
        if (self.recover_below is None) != (self.recover_interval is None):
            raise SettingsError("Backoff: recover_below and recover_interval go together")
        if self.recover_below is not None:
            check.number("recover_below", power=False)
            check.count("recover_interval", 1)

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale, left=self.hysteresis)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        count = ns.where(clean, state.clean + 1, ns.where(overflow, 0, state.clean))
        grow = ns.and_(clean, count >= self._interval(state, ns))
        lower, state = self._lower(state, overflow, clean, grow, ns)
        scale = state.scale
        scale = ns.where(
            grow,
            self._grown(scale, ns),
            ns.where(lower, self._lowered(scale, ns), scale),
        )
        count = ns.where(grow, 1 if self.growth_late == "first" else 0, count)
        return state._replace(scale=scale, clean=count)

    def _interval(self, state: ScaleState, ns: Any) -> Any:
        late = 0 if self.growth_late == "never" else 1
        interval = min(self.growth_interval + late, _NEVER)
        if self.recover_below is None or self.recover_interval is None:
            return interval
        slow = state.scale <= self.recover_below
        return ns.where(slow, self.recover_interval + late, interval)

    def _grown(self, scale: Any, ns: Any) -> Any:
        grown = ns.minimum(scale * self.growth_factor, self.max_scale)
        return grown if self.powers_of_two else ns.f32(grown)

    def _lowered(self, scale: Any, ns: Any) -> Any:
        lowered = ns.maximum(scale * self.backoff_factor, self.min_scale)
        return lowered if self.powers_of_two else ns.f32(lowered)

    def _lower(
        self, state: ScaleState, overflow: Any, clean: Any, grow: Any, ns: Any
    ) -> tuple[Any, ScaleState]:
        """Whether hysteresis and tolerance let this overflow lower the scale; and the new state."""
        lower = overflow
        if self.hysteresis > 1:
            left = ns.maximum(ns.where(overflow, state.left - 1, state.left), 0)
            lower = ns.and_(overflow, left <= 0)
            refill = grow if self.hysteresis_refill == "growth" else clean
            if self.hysteresis_refill == "streak":
                refill = ns.or_(refill, lower)
            state = state._replace(left=ns.where(refill, self.hysteresis, left))
        if self.tolerance > 0:
            share = Fraction(self.tolerance).limit_denominator(1000)
            steps = ns.where(ns.or_(overflow, clean), state.seen + 1, state.seen)
            steps = ns.minimum(steps, 2**20)  # keeps the products below inside 32 bits
            bad = ns.minimum(ns.where(overflow, state.level + 1, state.level), 2**20)
            often = bad * share.denominator >= steps * share.numerator
            lower = ns.and_(lower, often)
            changed = ns.or_(grow, lower)
            state = state._replace(level=ns.where(lower, 0, bad), seen=ns.where(changed, 0, steps))
        return lower, state

    @property
    def powers_only(self) -> bool:
        return self.powers_of_two


@dataclass(frozen=True)
class LateBackoff(Backoff):
    """`Backoff` whose every change takes effect one step later, as in MXNet.

    >>> from gradlift import Reading
    >>> rule = LateBackoff(init_scale=8)
    >>> state = rule.advance(rule.init(), Reading(nonfinite=True, amax=1.0))
    >>> state.scale, rule.advance(state, Reading(nonfinite=False, amax=1.0)).scale
    (8.0, 4.0)

    State: level is the change that is due, in bits.
    """

    name = "late-backoff"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance or not self.powers_of_two:
            raise SettingsError("LateBackoff: takes neither tolerance nor odd factors")

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        counts = ns.or_(overflow, clean)
        due = ns.where(
            state.level > 0,
            self._grown(state.scale, ns),
            ns.where(state.level < 0, self._lowered(state.scale, ns), state.scale),
        )
        now = state._replace(scale=ns.where(counts, due, state.scale))
        after = super()._respond(now, reading, overflow, clean, ns)
        up, down = round(math.log2(self.growth_factor)), round(math.log2(self.backoff_factor))
        level = ns.where(after.scale > now.scale, up, ns.where(after.scale < now.scale, down, 0))
        return after._replace(scale=now.scale, level=ns.where(counts, level, state.level))


@dataclass(frozen=True)
class WideningBackoff(Backoff):
    """`Backoff` whose interval moves with the scale, as in metaseq.

        growth:   interval <- 2 * interval, and the count of clean steps continues
        decrease: interval <- max(interval // 2, 1)

    so that growth comes N, 2N, 4N, ... clean steps after an overflow.

    >>> from gradlift import Reading
    >>> rule = WideningBackoff(init_scale=1, growth_interval=2)
    >>> state, scales = rule.init(), []
    >>> for _ in range(8):
    ...     state = rule.advance(state, Reading(nonfinite=False, amax=1.0))
    ...     scales.append(int(state.scale))
    >>> scales
    [1, 2, 2, 4, 4, 4, 4, 8]

    State: level is the interval.
    """

    name = "widening-backoff"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance or self.recover_below is not None or self.growth_late != "never":
            raise SettingsError("WideningBackoff: takes no tolerance, recovery or late growth")

    def init(self) -> ScaleState:
        return super().init()._replace(level=min(self.growth_interval, _NEVER))

    def _interval(self, state: ScaleState, ns: Any) -> Any:
        return state.level

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        after = super()._respond(state, reading, overflow, clean, ns)
        grown = ns.and_(clean, after.clean == 0)
        lower, _ = self._lower(state, overflow, clean, grown, ns)
        longer = ns.minimum(state.level, 2**29) * 2
        shorter = ns.maximum(state.level // 2, 1)
        level = ns.where(grown, longer, ns.where(lower, shorter, state.level))
        return after._replace(level=level, clean=ns.where(grown, state.clean + 1, after.clean))

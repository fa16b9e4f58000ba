"""`Headroom`: the rule behind "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import SettingsError, StateError
from ..formats import FP16, Format
from ..namespace import NOTHING, ONE_BIT, UNKNOWN, namespace
from ..reading import NAN, Reading
from .base import Checked, Rule, ScaleState

_FINE = 256  # from 1/256 to 1/65536 of a bit: a slow leak must not round to a stop
_BIT = ONE_BIT * _FINE
_WIDE, _STEP = 8 * _BIT, 4 * _BIT  # a gap above this leaks faster; the most that one search adds
_MOST = 512 * _BIT  # no level and no gap of float32 numbers goes beyond
_COLD, _BOLDER = 8, 6  # first jump of a search in bits before calibration; 2 after it
_VISIBLE = -16  # log2 to which the level is raised, by the scale, if all gradients are zero


def _log2(x: float) -> int:
    """log2 of a setting, in 1/256 of a bit, as the rule sees it."""
    return int(namespace(None).log2(x))


@dataclass(frozen=True)
class Headroom(Rule):
    """Keeps the largest gradient anywhere in the network just below the format's maximum.

    Parameter gradients show only part of it; the difference (the gap) is learned.

        x      = log2(amax / scale) + ceil(log2(replicas))         what a finite reading shows
        level <- max(x, level - leak - max(level - x - hold_bits, 0) / 4)         a leaky maximum
        gap   <- max(gap - explore - max(gap - 8, 0) / 256, 0)     how far peaks lie above it
        target = floor(log2(format.max) - level - gap)
        log2(scale) <- the nearest to log2(scale) in [target - band_bits, target]

    The first finite reading sets level = x, gap = margin_bits and log2(scale) = target: from any
    start one finite reading is enough. What flows between layers may be larger than what arrives
    at the parameters, so the gap is learned: it decays, so that a higher scale is tried, and an
    overflow restores it.

        overflow: log2(scale) falls by 2, 4, 8, ... 32 bits while overflows follow one another
                  (by 8, 16, 32 before anything finite was seen)
        the finite reading after it: the peak was above log2(format.max) - s, where s is the
                  lowest log2(scale) that overflowed, so
                  gap <- max(gap, min(log2(format.max) - s - level + 1, gap + 4))
                  and log2(scale) = target
        probed:   h = log2(probe_amax / scale) - x, and so gap <- gap within [h, h + hold_bits]
                  (h + margin_bits at least, if this is the first reading)
        all zero: level and gap are kept, and a search ends; if the level itself would be flushed,
                  log2(scale) rises to where it is not; before anything finite was seen it
                  rises to 2^16

    After a spike the level falls by a quarter of the difference a step, until it is `hold_bits`
    above the present amax, then by `leak`. `leak` and `explore` are in 1/65536 of a bit a finite
    step: 2048 is a bit in 32 steps.

    >>> from gradlift import Reading
    >>> rule = Headroom(init_scale=1)
    >>> rule.advance(rule.init(), Reading(nonfinite=False, amax=2.0**-10)).scale == 2**24
    True

    State: level and gap (in `spread`) in 1/65536 of a bit; clean is the last jump of a search in
    bits, 0 if there is none; seen is 1 once calibrated.
    """

    format: Format = FP16
    init_scale: float = 2.0**16
    margin_bits: int = 1
    band_bits: int = 1
    hold_bits: int = 2
    leak: int = 2048
    explore: int = 96
    replicas: int = 1
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**40

    name = "headroom"
    magnitudes = True

    def __post_init__(self) -> None:
        check = Checked(self)
        if not isinstance(self.format, Format):
            raise SettingsError(
                f"Headroom: format is {self.format!r}, expected a gradlift.formats.Format"
            )
        check.bounds()
        for bits in ("margin_bits", "band_bits", "hold_bits"):
            if check.count(bits, 0) > 64:
                raise SettingsError(f"Headroom: {bits} is {getattr(self, bits)}, expected 0 to 64")
        for speed, least in (("leak", 1), ("explore", 0)):
            if check.count(speed, least) > 64 * _BIT:
                raise SettingsError(
                    f"Headroom: {speed} is {getattr(self, speed)}, in 1/{_BIT} of a bit a step; "
                    f"expected at most {64 * _BIT}"
                )
        check.count("replicas", 1)

    @cached_property
    def _lowest(self) -> int:
        return _log2(self.min_scale) // ONE_BIT

    @cached_property
    def _highest(self) -> int:
        return _log2(self.max_scale) // ONE_BIT

    @cached_property
    def _top(self) -> int:
        return _log2(self.format.max) * _FINE

    @cached_property
    def _averaged(self) -> int:
        """Bits by which one replica's gradient may exceed the average of all."""
        return (self.replicas - 1).bit_length() * _BIT

    @cached_property
    def _margin(self) -> int:
        return self.margin_bits * _BIT

    @cached_property
    def _hold(self) -> int:
        return self.hold_bits * _BIT

    @cached_property
    def _far(self) -> float:
        return 2.0 ** max(4 - self.margin_bits, 0)

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale, spread=self._margin)

    def load(self, data: Any) -> ScaleState:
        """As for any rule; level, gap and search must also be within this rule's limits."""
        state = super().load(data)
        limits = {"clean": (0, 64), "seen": (0, 1), "spread": (0, _MOST), "level": (-_MOST, _MOST)}
        for name, (low, high) in limits.items():
            value = getattr(state, name)
            if not low <= value <= high:
                raise StateError(f"{name} is {value}, expected {low} to {high} from {self.name!r}")
        return state

    def calibrated(self, state: ScaleState) -> Any:
        """Has a finite reading been seen?

        >>> Headroom().calibrated(Headroom().init())
        False
        """
        return state.seen > 0

    def recompute(self, before: ScaleState, after: ScaleState) -> Any:
        """Should the batch that calibrated the rule be computed again, at the scale that it gave?

        Yes if the batch left more than 4 bits unused, or its gradients were all zero.

        >>> from gradlift import Reading
        >>> rule = Headroom()
        >>> after = rule.advance(rule.init(), Reading(nonfinite=False, amax=2.0**-10))
        >>> rule.recompute(rule.init(), after), rule.recompute(after, after)
        (True, False)
        """
        return (before.seen == 0) & (after.scale > self._far * before.scale)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        scale, jump, _, _, last, gap, seen = state
        used = ns.log2(scale)
        now = used // ONE_BIT
        shown = ns.log2(reading.amax)
        informed = ns.and_(clean, ns.and_(shown > NOTHING, shown < UNKNOWN))
        searching = jump > 0
        calibrated = seen > 0

        x = (shown - used) * _FINE + self._averaged
        stale = ns.maximum(last - x - self._hold, 0) // 4
        level = ns.where(calibrated, ns.maximum(x, last - stale - self.leak), x)

        # seen is 0 or 1: a product with it is a `where` that stays an int32 in every library.
        stale = ns.maximum(gap - _WIDE, 0) // 256
        gap = ns.maximum(gap - stale - seen * self.explore, 0)
        if reading.probe_amax is not NAN:  # the default: nothing was probed
            gap = self._probed(gap, reading.probe_amax, x + used * _FINE, seen, ns)
        proven = ns.minimum(self._top - (now + jump - 1) * _BIT - level, gap + _STEP)
        gap = ns.where(searching, ns.maximum(gap, proven), gap)

        target = (self._top - level - gap) // _BIT
        band = ns.where(searching, 0, seen * self.band_bits)
        fitting = ns.minimum(ns.maximum(now, target - band), target)

        fall = ns.where(searching, ns.minimum(jump * 2, 32), _COLD - seen * _BOLDER)
        visible = ns.where(calibrated, _VISIBLE - last // _BIT, 16)
        rise = ns.where(ns.and_(clean, shown == NOTHING), ns.maximum(visible, now), now)
        exponent = ns.where(informed, fitting, ns.where(overflow, now - fall, rise))
        exponent = ns.minimum(ns.maximum(exponent, self._lowest), self._highest)
        fallen = ns.maximum(now - exponent, 1)
        return ScaleState(
            ns.pow2(exponent),
            ns.where(overflow, fallen, ns.where(clean, 0, jump)),
            0,
            0,
            ns.where(informed, level, last),
            ns.where(informed, gap, state.spread),
            ns.where(informed, 1, seen),
        )

    def _probed(self, gap: Any, probe: Any, peak: Any, seen: Any, ns: Any) -> Any:
        probed = ns.log2(probe)
        above = probed * _FINE - peak
        least = above + self._margin - seen * self._margin
        bounded = ns.maximum(ns.maximum(ns.minimum(gap, above + self._hold), least), 0)
        return ns.where(ns.and_(probed > NOTHING, probed < UNKNOWN), bounded, gap)

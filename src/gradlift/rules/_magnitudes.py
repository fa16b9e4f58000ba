"""Rules of others that look at magnitudes: `LogMax` and `Histogram`; and what such rules share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._xp import NOTHING, ONE_BIT, UNKNOWN, namespace
from ..errors import SettingsError
from ..formats import FP16, Format
from ..reading import Reading
from ._rule import Checked, Rule, ScaleState

_NUMBERS = namespace(None)


def log2(x: float) -> int:
    """log2 of a setting, in 1/256 of a bit, as the rules see it."""
    return int(_NUMBERS.log2(x))


class Exponents(Rule):
    """A rule that works in exponents."""

    @cached_property
    def _lowest(self) -> int:
        return log2(self.min_scale) // ONE_BIT

    @cached_property
    def _highest(self) -> int:
        return log2(self.max_scale) // ONE_BIT

    def _scale(self, exponent: Any, ns: Any) -> Any:
        return ns.pow2(ns.minimum(ns.maximum(exponent, self._lowest), self._highest))


def check_format(rule: Any) -> None:
    if not isinstance(rule.format, Format):
        raise SettingsError(
            f"{type(rule).__name__}: format is {rule.format!r}, expected a gradlift.formats.Format"
        )


@dataclass(frozen=True)
class LogMax(Exponents):
    """Fits a bell curve to log2(amax), keeps its upper tail in range (OpenSeq2Seq, repaired).

        x      = log2(amax / scale), or log2_max after an overflow
        mu    <- mu    + (x - mu)        / min(n, mean_window)
        mad   <- mad   + (|x - mu| - mad) / min(n, spread_window)
        scale  = 2^floor(log2_max - (mu + deviations * 1.2533 mad))

    The original averaged 65536 instead of 16 on an overflow, which pinned the scale at its minimum
    for thousands of steps, and took the deviation from squares; a mean absolute deviation (times
    1.2533 for a bell curve) needs no square root, so it stays exact in integers.

    >>> from gradlift import Reading
    >>> rule = LogMax()
    >>> rule.advance(rule.init(), Reading(nonfinite=False, amax=2.0**6)).scale
    1024.0

    State: level is mu, spread is mad (both in 1/65536 of a bit), seen counts up to spread_window.
    """

    init_scale: float = 1.0
    log2_max: int = 16
    deviations: float = 3.09
    mean_window: int = 100
    spread_window: int = 1000
    min_scale: float = 1.0
    max_scale: float = 2.0**14

    name = "logmax"
    magnitudes = True

    def __post_init__(self) -> None:
        check = Checked(self)
        check.bounds()
        check.number("deviations", power=False)
        check.count("log2_max", 1)
        check.count("mean_window", 1)
        check.count("spread_window", 1)
        if self.deviations > 16:
            raise SettingsError(f"LogMax: deviations is {self.deviations!r}, expected at most 16")

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        fine = 256  # from 1/256 to 1/65536 of a bit: a slow average must not round to a stop
        peak = ns.log2(reading.amax)
        informed = ns.and_(clean, ns.and_(peak < UNKNOWN, peak > NOTHING))
        telling = ns.or_(overflow, informed)
        measured = (peak - ns.log2(state.scale)) * fine
        x = ns.where(overflow, self.log2_max * ONE_BIT * fine, measured)
        count = ns.minimum(state.seen + 1, max(self.mean_window, self.spread_window))
        mean_n = ns.minimum(count, self.mean_window)
        spread_n = ns.minimum(count, self.spread_window)
        level = state.level + (x - state.level + mean_n // 2) // mean_n
        off = ns.maximum(x - level, level - x)
        spread = state.spread + (off - state.spread + spread_n // 2) // spread_n
        # 1.2533 deviations in 1/256, applied to the spread in 1/256: no product leaves 32 bits.
        tail = (spread // fine) * round(1.2533 * self.deviations * 256) // 256
        exponent = (self.log2_max * ONE_BIT - level // fine - tail) // ONE_BIT
        return state._replace(
            scale=ns.where(telling, self._scale(exponent, ns), state.scale),
            level=ns.where(telling, level, state.level),
            spread=ns.where(telling, spread, state.spread),
            seen=ns.where(telling, count, state.seen),
        )


@dataclass(frozen=True)
class Histogram(Rule):
    """Halves while too many gradients are near the top, doubles while there is room (PopART).

        near   = format.max / 8
        crowd  = share of |gradients| above near > max_share     (no share taken: amax > near)
        halve  if overflow or crowd
        double if not crowd and amax * 2^band_bits <= near
        hold   otherwise: the dead band that the original lacks (band_bits=0 is the original)

    >>> from gradlift import Reading
    >>> rule = Histogram(init_scale=8)
    >>> rule.advance(rule.init(), Reading(nonfinite=False, amax=9000.0, near_max_share=1e-3)).scale
    4.0
    """

    format: Format = FP16
    init_scale: float = 2.0**16
    max_share: float = 1e-7
    band_bits: int = 2
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**40

    name = "histogram"
    magnitudes = True

    def __post_init__(self) -> None:
        check = Checked(self)
        check_format(self)
        check.bounds()
        check.count("band_bits", 0)
        check.share("max_share")

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        near = self.format.max / 8
        share = reading.near_max_share
        unknown = share != share  # NaN; "not share >= 0" is rewritten by TensorFlow, and loses it
        crowd = ns.or_(share > self.max_share, ns.and_(unknown, reading.amax > near))
        halve = ns.or_(overflow, ns.and_(clean, crowd))
        room = ns.and_(clean, ns.not_(crowd))
        if self.band_bits:
            room = ns.and_(room, reading.amax <= near / 2**self.band_bits)
        scale = ns.where(halve, state.scale * 0.5, ns.where(room, state.scale * 2.0, state.scale))
        return state._replace(scale=ns.maximum(ns.minimum(scale, self.max_scale), self.min_scale))

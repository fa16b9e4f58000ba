"""Rules of others that gradlift does not offer, as rivals in the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlift.formats import FP16, Format
from gradlift.reading import Reading
from gradlift.rules import Rule, ScaleState, parse
from gradlift.rules.base import LARGEST, SMALLEST, Checked


def rule_of(name: str) -> Rule:
    """A rule by its text, those of rivals included."""
    return PopArt() if name == PopArt.name else parse(name)


@dataclass(frozen=True)
class PopArt(Rule):
    """PopART's: halves while gradients are near the top, doubles while there is room.

    The original looks at the share of elements above an eighth of the format's largest number;
    traces hold the largest element only, and so does this one.
    """

    format: Format = FP16
    init_scale: float = 1.0
    min_scale: float = SMALLEST
    max_scale: float = LARGEST

    name = "popart"
    magnitudes = True

    def __post_init__(self) -> None:
        Checked(self).bounds()

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        crowded = reading.amax > self.format.max / 8
        halve = ns.or_(overflow, ns.and_(clean, crowded))
        double = ns.and_(clean, ns.not_(crowded))
        scale = ns.where(halve, state.scale * 0.5, ns.where(double, state.scale * 2.0, state.scale))
        return state._replace(scale=ns.maximum(ns.minimum(scale, self.max_scale), self.min_scale))

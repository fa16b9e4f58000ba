"""Rules that never move the scale: `Off` and `Static`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError
from ..formats import FP16
from ..reading import Reading
from .base import LARGEST, SMALLEST, Checked, Rule, ScaleState, setting_text


@dataclass(frozen=True)
class Off(Rule):
    """No loss scaling: nothing is inspected, cast or skipped.

    >>> Off().init().scale
    1.0
    """

    name = "off"
    min_scale = max_scale = 1.0

    def init(self) -> ScaleState:
        return ScaleState(1.0)

    def advance(self, state: ScaleState, reading: Reading, xp: Any = None) -> ScaleState:
        return state


@dataclass(frozen=True)
class Static(Rule):
    """scale = constant. Unlike `Off`, gradients are inspected and bad steps skipped.

    >>> str(Static(1024)), Static(1024).init().scale
    ('static:2^10', 1024.0)
    """

    scale: float = 1.0

    name = "static"

    def __post_init__(self) -> None:
        if not SMALLEST <= Checked(self).number("scale") <= LARGEST:
            raise SettingsError(
                f"Static: scale {setting_text(self.scale)} lies outside [2^-126, 2^126]"
            )

    @property
    def min_scale(self) -> float:  # type: ignore[override]
        return self.scale

    @property
    def max_scale(self) -> float:  # type: ignore[override]
        return self.scale

    def init(self) -> ScaleState:
        return ScaleState(self.scale)

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        return state

    def _loaded_scale(self, scale: Any) -> float:
        capped = 2.0**FP16.max_exponent  # all that a float16 loss can carry
        if isinstance(scale, float) and scale == capped < self.scale:
            return capped
        return super()._loaded_scale(scale)

    def __str__(self) -> str:
        return f"static:{setting_text(self.scale)}"

"""The base of all rules: frozen settings, a state of scalars, a pure `advance`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from ..errors import SettingsError, StateError
from ..formats import Format
from ..namespace import namespace
from ..reading import Reading
from ..text import shown

SCHEMA = 1
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # 1/scale and scale are normal float32 numbers in here


class ScaleState(NamedTuple):
    """The state of a rule: seven scalars (or 0-d arrays), the same fields for every rule.

    >>> from gradlift.rules import Backoff
    >>> Backoff().init()
    ScaleState(scale=65536.0, clean=0, skips=0, left=1, level=0, spread=0, seen=0)
    """

    scale: Any
    """The scale to use next."""
    clean: Any = 0
    """Clean steps since the last overflow or growth."""
    skips: Any = 0
    """Steps not applied in a row, whatever the cause."""
    left: Any = 0
    """Hysteresis left: overflows until the scale is lowered."""
    level: Any = 0
    """First integer of history; its meaning depends on the rule."""
    spread: Any = 0
    """Second integer of history."""
    seen: Any = 0
    """Third integer of history."""


class Rule:
    """Base of all rules. A rule defines `_respond`, which moves the state; the rest is common.

        overflow  = checked and nonfinite and not loss_nonfinite     the scale was too large
        clean     = checked and not nonfinite and not loss_nonfinite
        otherwise   the scale is kept

    >>> from gradlift import Reading
    >>> from gradlift.rules import Backoff
    >>> rule = Backoff(init_scale=8)
    >>> rule.advance(rule.init(), Reading(nonfinite=True, amax=float("inf"))).scale
    4.0
    """

    name = "rule"
    magnitudes = False
    """Does `advance` use amax? If not, an adapter need not measure it."""
    min_scale: float
    max_scale: float

    def init(self) -> ScaleState:
        """The state before the first step."""
        raise NotImplementedError

    def advance(self, state: ScaleState, reading: Reading, xp: Any = None) -> ScaleState:
        """The state after a step with this `reading`. Pure, and without branches on the data.

        `xp` is numpy, torch, jax.numpy or keras.ops if the scalars are 0-d arrays of that library.
        """
        ns = namespace(xp)
        finite = ns.not_(reading.nonfinite)
        loss_finite = ns.not_(reading.loss_nonfinite)
        clean = ns.and_(finite, loss_finite)
        overflow = ns.and_(reading.nonfinite, loss_finite)
        scale, count, _, left, level, spread, seen = self._respond(
            state, reading, overflow, clean, ns
        )
        skips = ns.where(clean, 0, state.skips + 1)
        after = ScaleState(scale, count, skips, left, level, spread, seen)
        checked = reading.checked
        if checked is True:
            return after if xp is None else ScaleState(*map(ns.like, after, state))
        return ScaleState(
            *(ns.like(ns.where(checked, new, old), old) for new, old in zip(after, state))
        )

    def calibrated(self, state: ScaleState) -> Any:
        """Has the rule seen how large the gradients are?"""
        return True

    def recompute(self, before: ScaleState, after: ScaleState) -> Any:
        """Should a clean batch be computed again, at the scale that its reading gave?"""
        return False

    def _respond(
        self, state: ScaleState, reading: Reading, overflow: Any, clean: Any, ns: Any
    ) -> ScaleState:
        """The next state. After a non-finite loss both flags are False, and nothing may change."""
        raise NotImplementedError

    def dump(self, state: ScaleState) -> dict[str, Any]:
        """The state as a plain dict that JSON can hold.

        >>> from gradlift.rules import Static
        >>> Static(8).dump(Static(8).init())["scale"]
        8.0
        """
        numbers = ScaleState(float(state.scale), *(int(x) for x in state[1:]))
        return {"schema": SCHEMA, "rule": self.name, **numbers._asdict()}

    def load(self, data: Any) -> ScaleState:
        """The state in a dict made by `dump`, checked field by field, or StateError.

        >>> from gradlift.rules import Static
        >>> Static(8).load(Static(8).dump(Static(8).init())).scale
        8.0
        """
        if not isinstance(data, dict):
            raise StateError(f"a scale state is a dict, this is {type(data).__name__}")
        schema = data.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise StateError(
                f"this scale state has schema {shown(schema)}, this gradlift reads schema {SCHEMA}"
            )
        if not is_name(data.get("rule"), self):
            raise StateError(
                f"this scale state was saved by the rule {shown(data.get('rule'))} whose history "
                f"{self.name!r} cannot read; load it with the rule it was saved with, or start "
                f"anew with init_scale={shown(data.get('scale'))}"
            )
        fields = []
        for field in ScaleState._fields:
            if field not in data:
                raise StateError(f"this scale state lacks {field!r}")
            fields.append(
                self._loaded_scale(data[field]) if field == "scale" else _count(field, data[field])
            )
        return ScaleState(*fields)

    def _loaded_scale(self, scale: Any) -> float:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise StateError(f"scale is {shown(scale)}, expected a number")
        if not 0 < scale < math.inf:
            raise StateError(f"scale is {shown(scale)}, expected a finite number above 0")
        if not self.min_scale <= scale <= self.max_scale:
            raise StateError(
                f"scale is {_scale_text(scale)}, outside this rule's "
                f"[{setting_text(self.min_scale)}, {setting_text(self.max_scale)}]"
            )
        if self.powers_only and not is_power_of_two(scale):
            raise StateError(f"scale is {scale!r}, not a power of two: it would round gradients")
        return float(scale)

    @property
    def powers_only(self) -> bool:
        """Are all its scales powers of two, so that scaling rounds no gradient?"""
        return True

    def __str__(self) -> str:
        """The text that `rules.parse` turns back into an equal rule."""
        changed = [
            f"{f.name}={setting_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def is_name(value: Any, rule: Rule) -> bool:
    """Is this the rule's name? A state may hold anything in its place."""
    return isinstance(value, str) and value == rule.name


def is_power_of_two(x: float) -> bool:
    """
    >>> is_power_of_two(0.25), is_power_of_two(6), is_power_of_two(float("inf"))
    (True, False, False)
    """
    return math.isfinite(x) and x > 0 and math.frexp(x)[0] == 0.5


def _scale_text(scale: float) -> str:
    return setting_text(float(scale)) if scale < 2.0**1000 else shown(scale)


def setting_text(value: Any) -> str:
    """A setting as text: 65536.0 -> 2^16, FP16 -> fp16, None -> none."""
    if isinstance(value, (bool, Format)) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        if is_power_of_two(value) and not 1 <= value < 2**10:
            return f"2^{math.frexp(value)[1] - 1}"
        return repr(int(value)) if value.is_integer() else repr(value)
    return str(value)


def _count(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**31 - 1:
        raise StateError(f"{field} is {shown(value)}, expected a 32-bit integer")
    if value < 0 and field not in ("level", "spread"):
        raise StateError(f"{field} is {value!r}, expected 0 or more")
    return value


class Checked:
    """Checks settings at construction; an error has the value given and what is expected."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.of = type(rule).__name__

    def number(self, name: str, *, power: bool = True) -> float:
        """A positive finite number, converted to float; a power of two if `power`."""
        value = getattr(self.rule, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SettingsError(f"{self.of}: {name} is {value!r}, expected a number")
        if not math.isfinite(value) or value <= 0:
            raise SettingsError(f"{self.of}: {name} is {value!r}, expected a finite number above 0")
        if power and not is_power_of_two(value):
            below = 2.0 ** math.floor(math.log2(value))
            raise SettingsError(
                f"{self.of}: {name} is {value!r}, not a power of two. Any other factor rounds "
                f"every gradient it is multiplied into; take {setting_text(below)} or "
                f"{setting_text(2 * below)}"
            )
        object.__setattr__(self.rule, name, float(value))
        return float(value)

    def count(self, name: str, at_least: int, *, bits: int | None = 31) -> int:
        """An integer, `at_least` or more, and of no more than so many bits."""
        value = getattr(self.rule, name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
            object.__setattr__(self.rule, name, value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SettingsError(f"{self.of}: {name} is {value!r}, expected a whole number")
        if value < at_least or (bits is not None and value >= 2**bits):
            raise SettingsError(f"{self.of}: {name} is {value!r}, expected {at_least} or more")
        return value

    def share(self, name: str) -> None:
        """A share in [0, 1]."""
        value = getattr(self.rule, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            raise SettingsError(f"{self.of}: {name} is {value!r}, expected a share in [0, 1]")

    def choice(self, name: str, *allowed: Any) -> None:
        value = getattr(self.rule, name)
        if value not in allowed:
            raise SettingsError(
                f"{self.of}: {name} is {value!r}, expected one of {', '.join(map(repr, allowed))}"
            )

    def bounds(self, *, power: bool = True) -> None:
        """init_scale, min_scale and max_scale, in order and inside float32's normal range."""
        low = self.number("min_scale", power=power)
        high = self.number("max_scale", power=power)
        start = self.number("init_scale", power=power)
        if not SMALLEST <= low <= high <= LARGEST:
            raise SettingsError(
                f"{self.of}: min_scale {setting_text(low)} and max_scale {setting_text(high)} "
                "must satisfy "
                "2^-126 <= min_scale <= max_scale <= 2^126, so that the scale and its inverse are "
                "normal float32 numbers"
            )
        if not low <= start <= high:
            raise SettingsError(
                f"{self.of}: init_scale {setting_text(start)} lies outside "
                f"[min_scale {setting_text(low)}, max_scale {setting_text(high)}]"
            )

"""Rules as text: `"megatron:hysteresis=4,min_scale=2^-4"`."""

from __future__ import annotations

from typing import Any

from ..errors import SettingsError
from ..formats import find
from .base import Rule
from .fixed import Static
from .presets import preset


def parse(what: str | float | Rule) -> Rule:
    """The rule that a text names; a number is a static scale, a rule is returned as it is.

    | text | rule |
    |---|---|
    | `"auto"`, `"auto:sharp"` | `Headroom`, close to overflow: for loops that retry |
    | `"auto:cautious"` | `Headroom` with more headroom: where an overflow costs a batch |
    | `"dynamic"` | `Backoff`: PyTorch's settings, with a floor |
    | `"static:1024"`, `"2^10"`, `1024` | `Static` |
    | `"off"` | `Off` |
    | `"megatron:hysteresis=4,min_scale=2^-4"` | a preset with settings replaced |

    >>> parse("2^10") == parse("static:1024") == parse(1024)
    True
    """
    if isinstance(what, Rule):
        return what
    if not isinstance(what, str):
        return Static(what)
    text = what.strip()
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    items = [item.strip() for item in rest.split(",") if item.strip()]
    if name == "auto" and items and items[0].lower() in ("sharp", "cautious"):
        name, items = "auto" if items[0].lower() == "sharp" else "auto:cautious", items[1:]
    if not rest and _is_number(name):
        return Static(_value(name))
    if name == "static" and len(items) == 1 and "=" not in items[0]:
        items = [f"scale={items[0]}"]
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise SettingsError(
                f"{text!r}: {item!r} is not a setting; write name=value, as in "
                "'megatron:hysteresis=4,min_scale=2^-4'"
            )
        settings[key.strip()] = _value(value.strip())
    return preset(name, **settings)


def resolve(what: str | float | Rule, *, retries: bool) -> Rule:
    """`parse`, where "auto" alone means the form that fits the loop: sharp if batches are retried,
    cautious if an overflow costs a batch.

    >>> resolve("auto", retries=False) == parse("auto:cautious")
    True
    >>> resolve("auto:sharp", retries=False) == resolve("auto", retries=True) == parse("auto")
    True
    """
    if isinstance(what, str) and not retries:
        name, _, rest = what.strip().partition(":")
        first = rest.partition(",")[0].strip().lower()
        if name.strip().lower() == "auto" and first not in ("cautious", "sharp"):
            return parse(f"auto:cautious,{rest}")
    return parse(what)


def _is_number(text: str) -> bool:
    return not isinstance(_value(text), str)


def _value(text: str) -> Any:
    """2^16, 65536, 0.5, 1e-7, true, none, fp16, or a word."""
    lowered = text.lower()
    if lowered in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[lowered]
    try:
        base, power, exponent = lowered.replace("**", "^").partition("^")
        if power:
            return float(base) ** int(exponent)
        return int(lowered) if lowered.lstrip("+-").isdigit() else float(lowered)
    except (ValueError, OverflowError, ZeroDivisionError):
        pass
    try:
        return find(lowered)
    except SettingsError:
        return text

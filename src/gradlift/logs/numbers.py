"""Numbers in a line of text: the expressions that find them, and what they come to."""

from __future__ import annotations

N = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:inf(?:inity)?|nan))"
"""A number: 3, 2.5e-4, inf, NAN."""
I = r"\d{1,18}"  # noqa: E741
"""A count."""
_MOST = 400  # characters: no float is longer


def number(text: object) -> float | None:
    """A float; None for what is no number.

    >>> number("1e-3"), number("nan."), number("N/A")
    (0.001, nan, None)
    """
    if text is None or text.__class__ is float:
        return text
    if isinstance(text, bool):
        return None
    try:
        if isinstance(text, str):
            return float(text.strip().rstrip(".")) if len(text) < _MOST else None
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def whole(text: object) -> int | None:
    """A count from 0 on; None for anything else.

    >>> whole("12"), whole(12.0), whole("-1"), whole("1.5")
    (12, 12, None, None)
    """
    value = None if text is None else number(text)
    if value is None or not 0 <= value < 2**63 or value != int(value):
        return None
    return int(value)

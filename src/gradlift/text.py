"""How a scale and a share are written; text from a file or a script, made safe to print."""

from __future__ import annotations

import math

UNKNOWN = "-"


def power(scale: float) -> str:
    """A scale as a power of two if it is one, else as a number.

    >>> power(65536.0), power(0.5), power(1100.0), power(float("nan"))
    ('2^16', '2^-1', '1100', '-')
    """
    if scale != scale:
        return UNKNOWN
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def percent(share: float) -> str:
    """A share in percent, with two or three digits; only an exact zero is written as 0.

    >>> percent(0.0), percent(0.00001), percent(0.0123), percent(0.25), percent(1.0)
    ('0 %', '< 0.01 %', '1.23 %', '25.0 %', '100 %')
    """
    if share != share:
        return UNKNOWN
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if share < 0.0001:
        return "< 0.01 %"
    if share > 0.9995:
        return "> 99.9 %"
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"


def visible(value: str, keep: str = "") -> str:
    r"""The same text with each character that could steer a terminal written as an escape.

    Those are control characters, marks of writing direction and lone surrogates.

    >>> print(visible("head\x1b[31m"))
    head\x1b[31m
    """
    if value.isprintable():
        return value
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in value
    )


def shown(value: object, most: int = 80) -> str:
    """A value of any make for a message: one short line. A repr may fail, or be as long as a file.

    >>> shown([1, "head"]), shown(10**9000), shown("x" * 100, most=8)
    ("[1, 'head']", '<int>', "'xxxx...")
    """
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = visible(text.replace("\n", " "))
    return text if len(text) <= most else text[: most - 3] + "..."

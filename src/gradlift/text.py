"""Text and values that came from a file or a script, made safe to print."""

from __future__ import annotations


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

"""Text that came from a file or a script, made safe to print."""

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

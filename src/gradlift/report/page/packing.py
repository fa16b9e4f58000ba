"""Long texts of the page, compressed: the charts' library is 4.8 MB of script, and 1.8 MB packed.

The browser unpacks them with DecompressionStream (web/unpack.js). Base 85 takes 5 characters for 4
bytes, base 64 takes 5.3; with it a page of 300 steps was above 2 MB.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from functools import lru_cache
from importlib.resources import files

from ...errors import GradliftError

SCRIPTS = (
    "unpack.js",
    "base.js",
    "steps.js",
    "gradients.js",
    "model.js",
    "charts.js",
    "view.js",
    "tables.js",
    "export.js",
    "start.js",
)
"""In this order they are one function's body."""


def packed(text: str) -> str:
    """A text as zlib's bytes in base 85, with "," for "<": an HTML parser finds no markup in it.

    The first word is the number of bytes, which base 85 rounds up.

    >>> small = packed("a" * 100_000)
    >>> len(small) < 200, "<" in small
    (True, False)
    """
    data = zlib.compress(text.encode(), 9)
    return f"{len(data)} {base64.b85encode(data, pad=True).decode().replace('<', ',')}"


def unpacked(text: str) -> str:
    """The text that was packed.

    >>> unpacked(packed("<b>"))
    '<b>'
    """
    length, _, digits = text.partition(" ")
    return zlib.decompress(base64.b85decode(digits.replace(",", "<"))[: int(length)]).decode()


def hash_of(script: str) -> str:
    """The name of an inline script in a content security policy.

    >>> hash_of("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@lru_cache
def charts_library() -> tuple[str, str]:
    """plotly's script: packed, and its name in the policy."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise GradliftError(
            "the page's charts need plotly: pip install 'gradlift[report]' "
            "(the text and JSON reports need nothing)"
        ) from None
    script = str(get_plotlyjs())
    return packed(script), hash_of(script)


@lru_cache
def script() -> str:
    """The page's own script."""
    parts = "\n".join(map(_resource, SCRIPTS))
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@lru_cache
def style() -> str:
    return _resource("page.css")


def _resource(name: str) -> str:
    return files(__package__).joinpath("web").joinpath(name).read_text("utf-8")

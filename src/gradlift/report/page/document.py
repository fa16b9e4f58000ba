"""The frame of a page: one file, without network requests.

Text from a run (names, notes, the command) is never markup: it is escaped, or packed, which leaves
no "<" in it. A content security policy in the head lets the browser run only the two
scripts of the page, by their hashes, and make no request.
"""

from __future__ import annotations

import json
from typing import Any

from ..._version import __version__
from . import packing
from .markup import escape


def document(heading: str, body: str, data: dict[str, Any]) -> str:
    """A whole page: `body` is HTML, `data` is what the script draws."""
    library, its_hash = packing.charts_library()
    script = packing.script()
    policy = (
        f"default-src 'none'; script-src {its_hash} {packing.hash_of(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(heading)}</title>
<style>{packing.style()}</style>
</head>
<body>
<main>
{body}
<footer>Made by gradlift {__version__}. This page is one file: it loads nothing and sends nothing.
</footer>
</main>
<aside id="view" aria-label="What is selected" hidden>
<p id="view-text" role="status"></p>
<button type="button" id="view-close" aria-label="select nothing">&times;</button>
</aside>
<script type="text/plain" id="data">{packed(data)}</script>
<script type="text/plain" id="charts-library">{library}</script>
<script>{script}</script>
</body>
</html>
"""


def packed(data: Any) -> str:
    """The data of a page as its script unpacks them.

    >>> packing.unpacked(packed({"name": "</script>"}))
    '{"name":"</script>"}'
    """
    return packing.packed(json.dumps(data, allow_nan=False, separators=(",", ":")))

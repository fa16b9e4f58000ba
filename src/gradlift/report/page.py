"""The report as one web page, without a second file or network requests.

Text from a run (names, notes, the command) is never markup: it is escaped, or is JSON in which "<"
is written as an escape. A content security policy in the head lets the browser run only the two
scripts of the page, by their hashes, and make no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from .._version import __version__
from ..analysis.diagnosis import Finding, diagnose
from ..analysis.exponents import parameters
from ..analysis.totals import totals
from ..errors import GradliftError
from ..journal import Run
from . import sections
from .charts import chart_data
from .modules import modules
from .sections import escape
from .story import rows, title
from .thinning import marks


def html(run: Run) -> str:
    """The whole report as one web page.

    >>> page = html(Run())
    >>> page.startswith("<!doctype html>"), "Nothing was recorded" in page
    (True, True)
    """
    return report(run, diagnose(run))


def report(run: Run, findings: Sequence[Finding]) -> str:
    """The same, with findings that are already known."""
    added, all_parameters, bad = totals(run), parameters(run), marks(run)
    data = chart_data(run, all_parameters, bad)
    body = [
        sections.head(run, added, findings),
        sections.figures(added),
        sections.findings(findings),
    ]
    if added.steps:
        body += [sections.thinned(data, added), sections.curves(data, bad)]
    body += [
        sections.gradients(run, all_parameters),
        sections.heat(data["heat"]),
        sections.parameters(all_parameters),
        sections.inside(modules(run)),
        sections.events(rows(run, bad)),
        sections.settings(run),
    ]
    return _page(f"{title(run)}: gradlift report", "\n".join(body), data)


def _page(heading: str, body: str, data: dict[str, Any]) -> str:
    plotly, script, style = _plotly(), _resource("page.js"), _resource("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; "
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
<style>{style}</style>
</head>
<body>
<main>
{body}
<footer>Made by gradlift {__version__}. This page is one file: it loads nothing and sends nothing.
</footer>
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def embedded(data: Any) -> str:
    r"""JSON without "<", so that an HTML parser finds no markup in it.

    >>> print(embedded({"name": "</script>"}))
    {"name":"\u003c/script>"}
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise GradliftError(
            "the page's charts need plotly: pip install 'gradlift[report]' "
            "(the text and JSON reports need nothing)"
        ) from None
    return str(get_plotlyjs())


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    """The name of an inline script in a content security policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

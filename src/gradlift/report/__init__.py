"""The reports of a run: a web page, plain text, JSON, or a summary of twenty lines.

Each is a pure function of a `Run`. None needs a framework; the page needs plotly.
"""

from .json_report import as_json
from .page import html
from .screen import summary
from .text_report import text

__all__ = ["html", "text", "as_json", "summary"]

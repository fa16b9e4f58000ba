"""A run as something to look at: one web page, plain text, JSON, or ten lines.

Each is a pure function of a `Run`; none needs a framework, and the page none but plotly.
"""

from ._html import html
from ._json import as_json
from ._text import summary, text

__all__ = ["html", "text", "as_json", "summary"]

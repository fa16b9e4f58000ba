"""Pieces of HTML. All text that comes from a run passes through `escape`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as _escape
from urllib.parse import urlencode


def escape(text: object) -> str:
    """Text as HTML, in which nothing of it is markup.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return _escape(str(text), quote=True)


def prose(text: str) -> str:
    """The same, with powers as superscripts, and arrows.

    >>> prose("2^16 -> 2^-3")
    '2<sup>16</sup> → 2<sup>-3</sup>'
    """
    set_ = re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", escape(text))
    return set_.replace(" -&gt; ", " → ")


def rendered(text: str) -> str:
    """The Markdown of `analysis/explained` as HTML: paragraphs, bold, code, blocks of code.

    >>> print(rendered("**Do** `x < 1`.\\n\\n```diff\\n-a\\n\\n+b\\n```"))
    <p><b>Do</b> <code>x &lt; 1</code>.</p>
    <pre tabindex="0">-a
    <BLANKLINE>
    +b</pre>
    """
    found = []
    for i, part in enumerate(re.split(r"^```\w*\n?", text, flags=re.MULTILINE)):
        if i % 2:
            found.append(f'<pre tabindex="0">{escape(part.rstrip())}</pre>')
            continue
        for paragraph in filter(None, map(str.strip, part.split("\n\n"))):
            bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(paragraph))
            inside = re.sub(r"`(.+?)`", r"<code>\1</code>", bold)
            found.append(f"<p>{inside}</p>")
    return "\n".join(found)


def breakable(name: str) -> str:
    """A name as HTML that may break after a dot or a slash.

    >>> breakable("head.weight")
    'head.<wbr>weight'
    """
    return re.sub(r"(?<=[._/])", "<wbr>", escape(name))


def link(inside: str, **view: object) -> str:
    """A link to a place in this page; `inside` is HTML.

    >>> link("5", step=5, parameter="a b")
    '<a href="#step=5&amp;parameter=a+b">5</a>'
    """
    return f'<a href="#{escape(urlencode(view))}">{inside}</a>'


def listed(links: Sequence[str], most: int = 12) -> str:
    """The first of several pieces of HTML, and how many more there are."""
    more = f" and {len(links) - most:,} more" if len(links) > most else ""
    return " ".join(links[:most]) + more


def section(
    heading: str, essence: str, inside: str, *, name: str = "", lead: str = "", folded: bool = True
) -> str:
    """A part of the page that folds; its heading and its essence, one line, stay.

    >>> print(section("Loss", "4 -> 1", "<p>...</p>"))
    <section>
    <details class="section">
    <summary><h2>Loss</h2> <span class="essence">4 → 1</span></summary>
    <p>...</p>
    </details>
    </section>
    """
    opened = "" if folded else " open"
    called = f' id="{name}"' if name else ""
    text = f'<p class="lead">{prose(lead)}</p>\n' if lead else ""
    return f"""<section{called}>
<details class="section"{opened}>
<summary><h2>{escape(heading)}</h2> <span class="essence">{prose(essence)}</span></summary>
{text}{inside}
</details>
</section>"""


def chart(name: str, heading: str, essence: str) -> str:
    """Where the page's script draws a chart. For a screen reader it is a picture with a text."""
    label = escape(f"Chart: {heading}. {essence}")
    return (
        f'<div class="chart" id="{name}" data-name="{escape(heading.lower())}" '
        f'role="img" aria-label="{label}"></div>'
    )


def absent(sentence: str) -> str:
    return f'<p class="absent">{escape(sentence)}</p>'


def table(
    name: str, heads: Iterable[str], rows: Iterable[str], *, kind: str = "", tall: bool = False
) -> str:
    """A table that scrolls by itself, can be focused, and can be saved under its name."""
    head = "".join(h if h.startswith("<th") else f'<th scope="col">{h}</th>' for h in heads)
    body = "\n".join(rows)
    return f"""<div class="scroll{" tall" if tall else ""}" tabindex="0" role="region"
 aria-label="{escape(name)}"><table data-name="{escape(name)}"{kind}>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>"""

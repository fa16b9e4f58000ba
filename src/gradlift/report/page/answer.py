"""The findings: the first in full, the others folded, each with its line of code and its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any

from ...analysis.diagnosis import Finding
from ...analysis.explain import explanation, known_kinds
from ...analysis.source import Source, source_of
from ...journal import Run
from .markup import breakable, escape, link, listed, prose, rendered

AROUND = 3  # lines of code before and after the one that is meant
CHARTS = {
    "scale": "scale",
    "headroom": "headroom",
    "norm": "gradient norm",
    "loss": "loss",
    "histogram": "gradients by exponent",
    "heat": "layer by step",
    "forward": "forward pass",
    "updates": "updates",
    "calls": "order of calls",
}
"""What a chart is called in a link to it."""
_CONFIDENCE = {
    "certain": "certain: seen directly",
    "likely": "likely: inferred from these numbers",
    "possible": "possible: the script may mean it so",
}


def findings(run: Run, found: Sequence[Finding], data: Mapping[str, Any], row: str = "") -> str:
    """All findings, most serious first; empty if there is none. `row` is the order of calls."""
    if not found:
        return ""
    source = source_of(run)
    about = data["findings"]
    cards = [_card(i, f, about[i], source, data, row) for i, f in enumerate(found)]
    first = cards[0]
    if len(cards) == 1:
        return f'<section id="findings" aria-label="Findings">\n{first}\n</section>'
    rest = "\n".join(cards[1:])
    heading = f"{len(cards) - 1} more finding{'s' * (len(cards) > 2)}"
    return f"""<section id="findings" aria-label="Findings">
{first}
<h2 class="more">{heading}</h2>
{rest}
</section>"""


def _card(
    position: int,
    finding: Finding,
    about: Mapping[str, Any],
    source: Source,
    data: Mapping[str, Any],
    row: str,
) -> str:
    first = position == 0
    severity, chart = escape(finding.severity), about["chart"]
    title = f"{prose(finding.title)} <span class=severity>{severity}, finding {position + 1}</span>"
    code = excerpt(source, finding.place)
    place = f'<p class="where">line <code>{escape(finding.place)}</code></p>'
    parts = [
        f"<p>{prose(finding.evidence)}</p>",
        code or (place if finding.place else ""),
        f"<p class=advice>{prose(finding.advice)}</p>" if finding.advice else "",
        _change(finding.diff),
        *_links(finding, chart, data),
        _meaning(finding),
    ]
    inside = "\n".join(part for part in parts if part)
    if first:
        copy = row if chart == "calls" else _copy(finding, chart, data)
        wide = " alone" if not copy or chart == "calls" else ""
        inside = f'<h2>{title}</h2>\n<div class="answer{wide}"><div>{inside}</div>{copy}</div>'
    else:
        inside = f"<details><summary><h3>{title}</h3></summary>\n{inside}\n</details>"
    identity = escape(about["id"])
    return (
        f'<article class="finding {severity}" data-finding="{identity}" tabindex="-1">'
        f"{inside}</article>"
    )


def _change(diff: str) -> str:
    """The advice as a change of lines; empty if they are not known."""
    if not diff:
        return ""
    kinds = {"-": "goes", "+": "comes"}
    place, *lines = diff.split("\n")
    shown = [
        f'<span class="{kinds.get(line[:1], "stays")}">{escape(line)}</span>' for line in lines
    ]
    return (
        f'<figure class="code change"><figcaption>the change of {escape(place)}</figcaption>\n'
        f'<pre tabindex="0">{chr(10).join(shown)}</pre></figure>'
    )


def _meaning(finding: Finding) -> str:
    """How sure it is, and, folded, what its kind means."""
    sure = f"<p class=where>{escape(_CONFIDENCE.get(finding.confidence, finding.confidence))}</p>"
    if finding.kind not in known_kinds():
        return sure
    called = f"What <code>{escape(finding.kind)}</code> means"
    text = rendered(explanation(finding.kind))
    return f'{sure}<details class="kind"><summary>{called}</summary>\n{text}</details>'


def _copy(finding: Finding, chart: str, data: Mapping[str, Any]) -> str:
    """A small copy of the chart in which one sees it; of a heatmap, the rows that are meant."""
    if chart not in CHARTS:
        return ""
    called, rows = CHARTS[chart], ""
    if chart == "forward":
        named = [name in _words(finding) for name in data[chart]["names"]]
        highest = data[chart]["high"]
        worst = max(range(len(named)), key=lambda i: (named[i], highest[i]))
        chart, rows = "forward-steps", f' data-row="{worst}"'
        called = f"largest output of {data['forward']['names'][worst]}; dotted: 65504"
    elif chart in ("heat", "updates"):
        called = {
            "heat": "exponent of scaled gradients, by parameter",
            "updates": "updates lost, in percent"
            if finding.kind == "updates-lost"
            else "update / weight, by parameter",
        }[chart]
    steps = f", marked at step {finding.steps[0]:,}" if finding.steps else ""
    label = f"Chart: {called}{steps}. The chart itself is further below."
    return (
        f'<figure class="seen"><figcaption>{escape(called[:1].upper() + called[1:])}</figcaption>\n'
        f'<div class="chart small" id="answer-chart" data-of="{chart}"{rows} role="img" '
        f'aria-label="{escape(label)}"></div></figure>'
    )


def _links(finding: Finding, chart: str, data: Mapping[str, Any]) -> list[str]:
    there: dict[str, Any] = {"chart": chart} if chart else {}
    over_steps = chart in ("scale", "headroom", "norm", "loss")
    rows = []
    if chart:
        view = {"step": finding.steps[0], **there} if finding.steps and over_steps else there
        rows.append(f"<p class=where>see it in: {link(CHARTS[chart], **view)}</p>")
    if finding.steps:
        at = there if over_steps else {}
        steps = [link(f"{step:,}", step=step, **at) for step in finding.steps]
        rows.append(f"<p class=where>steps {listed(steps)}</p>")
    if finding.parameters:
        names = [link(breakable(name), parameter=name) for name in finding.parameters]
        rows.append(f"<p class=where>parameters {listed(names)}</p>")
    known = data["forward"]["names"]
    modules = [m for m in known if m and not m.isdigit() and m in _words(finding)]
    if modules:
        names = [link(breakable(name), module=name) for name in modules]
        rows.append(f"<p class=where>modules {listed(names)}</p>")
    return rows


def _words(finding: Finding) -> set[str]:
    """The words of its title and evidence, which name modules."""
    text = f"{finding.title} {finding.evidence}"
    return {word.strip(".,:;()'") for word in text.split()}


def excerpt(source: Source, place: str) -> str:
    """The line of "train.py:34" among those around it; empty if it was not recorded.

    >>> print(excerpt({"a.py": {1: "x = 1", 2: "y = x < 2"}}, "a.py:2"))
    <figure class="code"><figcaption>a.py:2</figcaption>
    <pre tabindex="0"><span>1  x = 1</span>
    <mark>2  y = x &lt; 2</mark></pre></figure>
    """
    file, _, text = place.rpartition(":")
    lines = source.get(file, {})
    if not text.isdecimal() or int(text) not in lines:
        return ""
    at = int(text)
    near = [n for n in sorted(lines) if abs(n - at) <= AROUND]
    wide = len(str(near[-1]))
    texts = dict(zip(near, dedent("\n".join(lines[n] for n in near)).split("\n"), strict=True))
    shown = []
    for n in near:
        tag = "mark" if n == at else "span"
        shown.append(f"<{tag}>{n:>{wide}}  {escape(texts[n])}</{tag}>")
    return (
        f'<figure class="code"><figcaption>{escape(place)}</figcaption>\n'
        f'<pre tabindex="0">{chr(10).join(shown)}</pre></figure>'
    )

"""The page, section by section. All text that comes from a run passes through `escape`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as _escape
from typing import Any

from ..analysis import words
from ..analysis.diagnosis import Finding
from ..analysis.exponents import Counts, Parameter, quantile
from ..analysis.totals import Totals
from ..formats import Shares
from ..journal import Run
from . import story
from .charts import FORMATS, sum_of
from .modules import MOST_MODULES, Module
from .thinning import MOST_PARAMETERS, Mark


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


def head(run: Run, added: Totals, findings: Sequence[Finding]) -> str:
    severity, sentence = story.verdict(run, findings)
    known = story.settings(run)
    about = [known[name] for name in ("rule", "framework", "mode", "time") if name in known]
    return f"""<header>
<p class="brand">gradlift report</p>
<h1>{escape(story.title(run))}</h1>
<p class="about">{escape(" · ".join(about))}</p>
<p class="verdict {severity}" id="verdict">{prose(sentence)}</p>
{"".join(f'<p class="looks">{escape(line)}</p>' for line in story.looks(run))}
</header>"""


def figures(added: Totals) -> str:
    cells = "\n".join(
        f"<div><dt>{escape(what)}</dt><dd>{prose(value)}</dd>"
        f'<dd class="remark">{prose(remark)}</dd></div>'
        for what, value, remark in story.figures(added)
    )
    return f'<dl class="figures">\n{cells}\n</dl>'


def findings(found: Sequence[Finding]) -> str:
    if not found:
        return ""
    cards = "\n".join(map(_finding, found))
    return f'<section id="findings">\n<h2>Findings</h2>\n{cards}\n</section>'


def _finding(finding: Finding) -> str:
    steps = [f"{step:,}" for step in finding.steps]
    lists = [
        f"<p class=where>{name} {_chips(things)}</p>"
        for name, things in (("steps", steps), ("parameters", list(finding.parameters)))
        if things
    ]
    if finding.place:
        lists.insert(0, f"<p class=where>line <code>{escape(finding.place)}</code></p>")
    advice = f"<p class=advice>{prose(finding.advice)}</p>" if finding.advice else ""
    return (
        f'<article class="finding {escape(finding.severity)}">'
        f"<h3>{prose(finding.title)} <span class=severity>{escape(finding.severity)}</span></h3>"
        f"<p>{prose(finding.evidence)}</p>{''.join(lists)}{advice}</article>"
    )


def _chips(things: list[str], most: int = 12) -> str:
    more = f" and {len(things) - most:,} more" if len(things) > most else ""
    return " ".join(f"<code>{escape(thing)}</code>" for thing in things[:most]) + more


def thinned(data: dict[str, Any], added: Totals) -> str:
    """A note on what was left out; empty if nothing was."""
    drawn = sum(len(line["step"]) for line in data["lines"])
    heat = data["heat"]
    sentences = []
    if drawn < added.steps:
        sentences.append(
            f"This page was thinned. Its curves show {drawn:,} of {added.steps:,} steps: the "
            "smallest and the largest value of every range of steps, and all marked steps."
        )
    if sum(data["marks"]["times"]) > len(data["marks"]["times"]):
        sentences.append("Neighbouring bad steps share a mark with their number: none is left out.")
    if len(heat["step"]) < heat["all"]:
        sentences.append(
            f"The heatmap shows {len(heat['step']):,} of {heat['all']:,} samples; "
            "the table and the histogram count all of them."
        )
    return f'<p class="note" id="thinned">{escape(" ".join(sentences))}</p>' if sentences else ""


def curves(data: dict[str, Any], marks: list[Mark]) -> str:
    causes = ", ".join(dict.fromkeys(mark.cause for mark in marks))
    marked = f"A mark is a step that was skipped or retried: {causes}." if marks else ""
    return "\n".join(
        [
            _chart(
                "scale",
                "Scale",
                "The number that the loss was multiplied by, as a power of two. " + marked,
                data,
            ),
            _chart(
                "headroom",
                "Headroom",
                "Bits between the largest scaled gradient and FP16's largest number, 65504. "
                "At 0 it overflows. With much headroom the scale could be higher, and small "
                "gradients are lost without need.",
                data,
            ),
            _chart("norm", "Gradient norm", "Of the unscaled gradients, before clipping.", data),
            _chart("loss", "Loss", "The loss before it was scaled.", data),
        ]
    )


def _chart(name: str, heading: str, lead: str, data: dict[str, Any]) -> str:
    known = any(value is not None for line in data["lines"] for value in line[name])
    inside = f'<div class="chart" id="{name}"></div>' if known else _absent("It was not recorded.")
    return f"<section>\n<h2>{heading}</h2>\n<p class=lead>{prose(lead)}</p>\n{inside}\n</section>"


def _absent(sentence: str) -> str:
    return f"<p class=absent>{escape(sentence)}</p>"


NO_SAMPLES = (
    "No gradients were sampled. `gradlift run --every 50`, or every=50 of a scaler, "
    "records one step in fifty."
)


def gradients(run: Run, all_parameters: list[Parameter]) -> str:
    heading = "<h2>Gradients by exponent</h2>"
    seen = [p for p in all_parameters if p.elements]
    if not seen:
        return f"<section id=gradients>\n{heading}\n{_absent(NO_SAMPLES)}\n</section>"
    options = "".join(
        f'<option value="{i}">{escape(p.name)}</option>'
        for i, p in enumerate(seen[:MOST_PARAMETERS], 1)
    )
    return f"""<section id="gradients">
{heading}
<p class="lead">How large gradients are, as powers of two, and which of them each format can hold.
Left of FP16's range they are flushed to zero; in its pale part they are subnormal and lose bits.
</p>
<label class="field">of <select id="which"><option value="0">all parameters</option>
{options}</select></label>
<div class="chart" id="histogram"></div>
{_fates(seen)}
</section>"""


def _fates(seen: list[Parameter]) -> str:
    """Shares of all sampled gradients in each format, before and after scaling."""
    elements = sum(p.elements for p in seen)
    tables = "".join(
        _fate_table(state, sum_of(counts), elements)
        for state, counts in (
            ("true", (p.true for p in seen)),
            ("as scaled", (p.scaled for p in seen)),
        )
    )
    zeros = words.percent(sum(p.zeros for p in seen) / elements)
    return f"""<div class="fates">{tables}</div>
<p class="note">Shares of all sampled elements. {zeros} were zero and are not included: they were
flushed in the backward pass, or had no gradient, like an embedding's unused rows.
</p>"""


def _fate_table(state: str, counts: Counts, elements: int) -> str:
    if not counts:
        return ""
    body = "".join(
        f"<tr><th scope=row>{format.name}</th>{_shares(format.shares(counts, elements))}</tr>"
        for format in FORMATS
    )
    heads = f"<th>{state}</th><th>flushed</th><th>subnormal</th><th>overflow</th>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _shares(shares: Shares) -> str:
    return "".join(f"<td>{escape(words.percent(share))}</td>" for share in shares)


def heat(found: dict[str, Any]) -> str:
    if not found["names"]:
        return ""
    modes = (("median", "median"), ("low", "smallest"), ("high", "largest"), ("zero", "zeros"))
    buttons = "".join(
        f'<button type="button" data-mode="{mode}" aria-pressed="{str(mode == "median").lower()}">'
        f"{word}</button>"
        for mode, word in modes
    )
    return f"""<section>
<h2>Layer by step</h2>
<p class="lead">The exponent of each parameter's scaled gradient, at every sampled step. Blue is
normal in FP16, amber is subnormal, red is flushed or close to overflow.</p>
<div class="modes" id="modes" role="group" aria-label="value">{buttons}</div>
<div class="chart" id="heat"></div>
</section>"""


def inside(found: list[Module]) -> str:
    """The gradients between modules; empty if none were probed."""
    if not found:
        return ""
    lifted = any(m.lift == m.lift for m in found)
    heads = ["module", "headroom", "zero", "subnormal", "near top", *(["lift"] if lifted else [])]
    body = "\n".join(
        f"<tr><th scope=row>{escape(m.name)}</th>"
        + "".join(f"<td>{prose(cell)}</td>" for cell in story.inside(m, lifted))
        + "</tr>"
        for m in found[:MOST_MODULES]
    )
    left = len(found) - MOST_MODULES
    more = f"<p class=note>{left:,} more with more headroom.</p>" if left > 0 else ""
    return f"""<section id="inside">
<h2>Between modules</h2>
<p class="lead">Float16 gradients between modules, as probed, least headroom first. Overflow often
starts here, before the gradients of parameters show it.</p>
<div class="scroll"><table class="inside"><thead><tr>{"".join(f"<th>{h}</th>" for h in heads)}</tr>
</thead><tbody>
{body}
</tbody></table></div>{more}
</section>"""


_COLUMNS = (
    ("parameter", "name", ""),
    ("flushed", "number", "share that is zero as scaled, or would be in FP16"),
    ("subnormal", "number", "share that FP16 holds with fewer bits"),
    ("near top", "number wide", "share above 65504/8"),
    ("smallest", "number wide", "lowest exponent, as scaled"),
    ("median", "number middle", "median exponent, as scaled"),
    ("largest", "number wide", "highest exponent, as scaled"),
    ("culprit", "number", "bad steps in which its gradient was not finite"),
    ("first", "number wide", "bad steps in which it was the first culprit"),
    ("elements", "number wide", "size of the parameter"),
)


def parameters(all_parameters: list[Parameter]) -> str:
    if not all_parameters:
        return ""
    heads = "".join(
        f'<th class="{kind}" scope="col">'
        f'<button type="button" title="{remark}">{name}</button></th>'
        for name, kind, remark in _COLUMNS
    )
    drawn = all_parameters[:MOST_PARAMETERS]
    positions = iter(range(1, len(drawn) + 1))
    body = "\n".join(_parameter(p, next(positions) if p.elements else None) for p in drawn)
    left = len(all_parameters) - len(drawn)
    more = f" {left:,} more are not shown; the JSON report has all." if left else ""
    return f"""<section>
<h2>Parameters</h2>
<p class="lead">Worst first: most elements lost, or most often the first culprit. Click a column
head to sort, a name to see its histogram.{more}</p>
<label class="field">search
<input id="search" type="search" placeholder="part of a name" autocomplete="off"></label>
<span class="note" id="shown" aria-live="polite"></span>
<div class="scroll tall"><table id="parameters">
<thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table></div>
</section>"""


def _parameter(p: Parameter, histogram: int | None) -> str:
    name = re.sub(r"(?<=[._/])", "<wbr>", escape(p.name))  # long names may break there
    if histogram is not None:
        name = f'<button type="button" class="link" data-show="{histogram}">{name}</button>'
    shares: list[float | None] = [None] * 3
    if p.elements:
        shares = [p.shares.flushed, p.shares.subnormal, p.near_max]
    exponents = [min(p.scaled, default=None), quantile(p.scaled, 0.5), max(p.scaled, default=None)]
    cells: list[tuple[float | None, str]] = [
        *((s, words.UNKNOWN if s is None else words.percent(s)) for s in shares),
        *((e, words.UNKNOWN if e is None else str(e)) for e in exponents),
        (p.culprit, f"{p.culprit:,}"),
        (p.leads, f"{p.leads:,}"),
        (p.size, words.UNKNOWN if p.size is None else f"{p.size:,}"),
    ]
    rest = "".join(
        f'<td class="{kind}" data-v="{"" if value is None else f"{value:.6g}"}">{escape(text)}</td>'
        for (value, text), (_, kind, _) in zip(cells, _COLUMNS[1:], strict=True)
    )
    return f'<tr><td class="name">{name}</td>{rest}</tr>'


def events(happened: list[story.EventRow]) -> str:
    if not happened:
        none = _absent("None: no step was skipped or retried.")
        return f"<section>\n<h2>Events</h2>\n{none}\n</section>"
    body = "\n".join(
        f'<tr><td class="number">{escape(words.where(row.first, row.last))}</td>'
        f"<td>{escape(row.what)}</td><td>{prose(row.text)}</td></tr>"
        for row in happened
    )
    return f"""<section>
<h2>Events</h2>
<div class="scroll tall"><table id="events">
<thead><tr><th class="number">step</th><th>what</th><th></th></tr></thead>
<tbody>
{body}
</tbody></table></div>
</section>"""


def settings(run: Run) -> str:
    facts = story.settings(run)
    known = story.versions(run)
    if not facts and not known:
        return ""
    return f"""<section>
<h2>Settings and versions</h2>
<div class="facts">{_facts(facts.items())}{_facts(known.items())}</div>
</section>"""


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{inside}</dl>"

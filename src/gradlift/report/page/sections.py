"""The page, section by section. All text that comes from a run passes through `escape`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...analysis import words
from ...analysis.diagnosis import Finding
from ...analysis.exponents import Counts, Parameter, quantile
from ...analysis.totals import Totals
from ...formats import Shares
from ...journal import Run
from .. import story
from ..charts import FORMATS, sum_of
from ..modules import MOST_MODULES, Module
from ..sampled import MOST_RANGES, Outputs, Updates
from ..thinning import MOST_PARAMETERS, Mark
from .markup import absent, breakable, chart, escape, link, prose, section, table


def head(run: Run, findings: Sequence[Finding]) -> str:
    severity, sentence = story.verdict(run, findings)
    known = story.settings(run)
    about = [known[name] for name in ("rule", "framework", "mode", "time") if name in known]
    return f"""<header>
<p class="brand">gradlift report</p>
<h1>{escape(story.title(run))}</h1>
<p class="about">{escape(" · ".join(about))}</p>
<p class="verdict {severity}" id="verdict">{prose(sentence)}</p>
</header>"""


def looks(run: Run, folded: bool) -> str:
    """What was looked at; empty for an empty run."""
    lines = "".join(f"<p class=note>{escape(line)}</p>" for line in story.looks(run))
    if not run.steps:
        return ""
    return (
        f'<details class="looks"{"" if folded else " open"}>'
        f"<summary>What was looked at, and what was not</summary>{lines}</details>"
    )


def figures(added: Totals) -> str:
    cells = "\n".join(
        f"<div><dt>{escape(what)}</dt><dd>{prose(value)}</dd>"
        f'<dd class="remark">{prose(remark)}</dd></div>'
        for what, value, remark in story.figures(added)
    )
    return f'<dl class="figures">\n{cells}\n</dl>'


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


def curves(
    data: dict[str, Any], marks: list[Mark], added: Totals, essences: Mapping[str, str] = {}
) -> str:
    """The charts over steps. `essences` replaces what is written beside a heading."""
    causes = ", ".join(dict.fromkeys(mark.cause for mark in marks))
    marked = f" A mark is a step that was skipped or retried: {causes}." if marks else ""
    scale = " -> ".join(dict.fromkeys(map(words.power, (added.first_scale, added.last_scale))))
    tightest = added.worst_headroom_step
    least = "" if tightest is None else f", at step {tightest:,}"
    loss = " -> ".join(map(words.number, (added.first_loss, added.last_loss)))
    known = {
        "scale": f"{scale}; {words.count(added.skipped, 'step')} skipped",
        "headroom": f"{words.bits(added.worst_headroom)} at least{least}",
        "norm": _between(data, "norm"),
        "loss": loss,
        **essences,
    }
    leads = (
        (
            "scale",
            "Scale",
            "The number that the loss was multiplied by, as a power of two." + marked,
        ),
        (
            "headroom",
            "Headroom",
            "Bits between the largest scaled gradient and FP16's largest number, 65504. "
            "At 0 it overflows. With much headroom the scale could be higher, and small "
            "gradients are lost without need.",
        ),
        ("norm", "Gradient norm", "Of the unscaled gradients, before clipping."),
        ("loss", "Loss", "The loss before it was scaled."),
    )
    return "\n".join(
        _curve(name, heading, lead, known[name], data) for name, heading, lead in leads
    )


def _between(data: dict[str, Any], name: str) -> str:
    values = [v for line in data["lines"] for v in line[name] if v is not None]
    return f"between {min(values):.3g} and {max(values):.3g}" if values else ""


def _curve(name: str, heading: str, lead: str, essence: str, data: dict[str, Any]) -> str:
    known = any(value is not None for line in data["lines"] for value in line[name])
    if not known:
        return section(heading, "not recorded", absent("It was not recorded."), lead=lead)
    return section(heading, essence, chart(name, heading, essence), lead=lead, folded=False)


MOST_ROWS = 50  # of the tables of modules and of updates
NO_SAMPLES = (
    "No gradients were sampled. `gradlift run --every 50`, or every=50 of a scaler, "
    "records one step in fifty."
)


def gradients(run: Run, all_parameters: list[Parameter]) -> str:
    heading = "Gradients by exponent"
    seen = [p for p in all_parameters if p.elements]
    if not seen:
        return section(heading, "no samples", absent(NO_SAMPLES), name="gradients")
    options = "".join(
        f'<option value="{i}">{escape(p.name)}</option>'
        for i, p in enumerate(seen[:MOST_PARAMETERS], 1)
    )
    elements = sum(p.elements for p in seen)
    scaled = FORMATS[0].shares(sum_of(p.scaled for p in seen), elements)
    essence = (
        f"as scaled, {words.percent(scaled.flushed)} flushed by FP16, "
        f"{words.percent(scaled.subnormal)} subnormal"
    )
    inside = f"""<label class="field">of <select id="which">
<option value="0">all parameters</option>
{options}</select></label>
{chart("histogram", heading, essence)}
<details><summary>Shares in each format</summary>
{_fates(seen)}
</details>"""
    lead = (
        "How large gradients are, as powers of two, and which of them each format can hold. Left "
        "of FP16's range they are flushed to zero; in its pale part they are subnormal and lose "
        "bits."
    )
    return section(heading, essence, inside, name="gradients", lead=lead, folded=False)


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
    body = [
        f"<tr><th scope=row>{format.name}</th>{_shares(format.shares(counts, elements))}</tr>"
        for format in FORMATS
    ]
    made = table(f"shares, {state}", (text_head(state), "flushed", "subnormal", "overflow"), body)
    return f"<div>{made}</div>"


def _shares(shares: Shares) -> str:
    return "".join(f"<td>{escape(words.percent(share))}</td>" for share in shares)


def _modes(of: str, modes: Iterable[tuple[str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" data-mode="{mode}" aria-pressed="{str(not i).lower()}">'
        f"{word}</button>"
        for i, (mode, word) in enumerate(modes)
    )
    return f'<div class="modes" data-of="{of}" role="group" aria-label="value">{buttons}</div>'


def heat(found: dict[str, Any], folded: bool) -> str:
    if not found["names"]:
        return ""
    modes = (("median", "median"), ("low", "smallest"), ("high", "largest"), ("zero", "zeros"))
    parameters = words.count(len(found["names"]), "parameter")
    essence = f"{parameters}, {words.count(len(found['step']), 'sample')}"
    return section(
        "Layer by step",
        essence,
        _modes("heat", modes) + chart("heat", "Layer by step", essence),
        lead="The exponent of each parameter's scaled gradient, at every sampled step. Blue is "
        "normal in FP16, amber is subnormal, red is flushed or close to overflow.",
        folded=folded,
    )


def forward(found: list[Outputs], data: Mapping[str, Any], folded: bool) -> str:
    """Each module's outputs against 65504; empty if none were looked at."""
    if not found:
        return ""
    worst = max(found, key=lambda m: m.high)
    bits = f"{words.bits(worst.headroom)} below 65504"
    how = "not finite" if worst.high == math.inf else bits
    essence = f"{worst.name}: {how} at step {worst.at:,}"
    options = "".join(
        f'<option value="{i}"{" selected" * (name == worst.name)}>{escape(name)}</option>'
        for i, name in enumerate(data["names"])
    )
    rows = [
        '<tr><th scope=row class="name">'
        f"{link(breakable(m.name), module=m.name)}</th><td class=t>{escape(m.type)}</td>"
        f"<td class=t>{escape(m.dtype)}</td>{_number(m.high, '.4g')}{_number(m.headroom, '.1f')}"
        f"<td>{link(f'{m.at:,}', step=m.at)}</td>"
        f"{_share(m.zero)}{_number(m.nonfinite, ',')}</tr>"
        for m in sorted(found, key=lambda m: -m.high)[:MOST_ROWS]
    ]
    heads = (*map(text_head, ("module", "type", "dtype")), "largest", "bits below 65504", "at step")
    more = f" The {MOST_RANGES} largest of {len(found):,}." if len(found) > MOST_RANGES else ""
    inside = f"""{chart("forward", "Forward range by module", essence)}
<label class="field">over steps: <select id="module">{options}</select></label>
{chart("forward-steps", "Largest output of one module over steps", essence)}
<details><summary>{_table_of(found, "module", "largest")}</summary>
{table("forward pass", (*heads, "zeros", "not finite"), rows, tall=True)}
</details>"""
    return section(
        "Forward range by module",
        essence,
        inside,
        name="activations",
        lead="The largest |output| of each module in the forward pass, from the smallest to the "
        "largest of all looks, beside 65504, where float16 ends. Grey modules did not compute in "
        f"float16: they show whether it would hold them.{more}",
        folded=folded,
    )


def updates(found: list[Updates], data: Mapping[str, Any], folded: bool) -> str:
    """How far each parameter moved; empty if no weights were looked at."""
    if not found:
        return ""
    ratios = sorted(u.ratio for u in found if u.ratio == u.ratio)
    middle = f"update / weight {ratios[len(ratios) // 2]:.1e} in the middle" if ratios else ""
    worst = found[0]
    most = f"at most {words.percent(worst.lost)} of updates lost" if worst.lost else "none lost"
    essence = ", ".join(part for part in (middle, most if worst.lost == worst.lost else "") if part)
    rows = [
        '<tr><th scope=row class="name">'
        f"{link(breakable(u.name), parameter=u.name)}</th><td class=t>{escape(u.dtype)}</td>"
        f"{_number(u.ratio, '.2g')}{_share(u.lost)}{_share(u.below_eps)}"
        f"{_number(u.nonfinite, ',')}</tr>"
        for u in found[:MOST_ROWS]
    ]
    facts = ("update / weight", "lost", "below eps", "samples not finite")
    heads = (*map(text_head, ("parameter", "dtype")), *facts)
    inside = f"""{_modes("updates", (("ratio", "update / weight"), ("lost", "lost")))}
{chart("updates", "Updates", essence) if data["names"] else ""}
<details><summary>{_table_of(found, "parameter", "most lost")}</summary>
{table("updates", heads, rows, tall=True)}
</details>"""
    return section(
        "Updates",
        essence,
        inside,
        name="moved",
        lead="How far a step moves each parameter: |update| / |weight|, both as root mean squares. "
        "Lost is the share of updates that the weight's own format rounds away.",
        folded=folded,
    )


def _table_of(found: Sequence[object], thing: str, first: str) -> str:
    """What a folded table is called: all, or the first of many."""
    if len(found) <= MOST_ROWS:
        return f"As a table: {words.count(len(found), thing)}"
    return f"As a table: {MOST_ROWS} of {len(found):,} {thing}s, {first} first; JSON has all"


def text_head(heading: str) -> str:
    """The head of a column of text; numbers stand on the right."""
    return f'<th scope="col" class="t">{escape(heading)}</th>'


def _number(value: float, how: str) -> str:
    known = value == value
    text = format(value, how) if known else words.UNKNOWN
    return f'<td data-v="{f"{value:.4g}" if known else ""}">{text}</td>'


def _share(value: float) -> str:
    known = f"{value:.4g}" if value == value else ""
    return f'<td data-v="{known}">{escape(words.percent(value))}</td>'


def inside(found: list[Module]) -> str:
    """The gradients between modules; empty if none were probed."""
    if not found:
        return ""
    lifted = any(m.lift == m.lift for m in found)
    heads = ["module", "headroom", "zero", "subnormal", "near top", *(["lift"] if lifted else [])]
    rows = [
        f"<tr><th scope=row>{link(breakable(m.name), module=m.name)}</th>"
        + "".join(f"<td>{prose(cell)}</td>" for cell in story.inside(m, lifted))
        + "</tr>"
        for m in found[:MOST_MODULES]
    ]
    left = len(found) - MOST_MODULES
    more = f"<p class=note>{left:,} more with more headroom.</p>" if left > 0 else ""
    return section(
        "Between modules",
        f"{found[0].name}: {words.bits(found[0].headroom)} of headroom",
        table("between modules", [text_head(heads[0]), *heads[1:]], rows) + more,
        name="inside",
        lead="Float16 gradients between modules, as probed, least headroom first. Overflow often "
        "starts here, before the gradients of parameters show it.",
    )


_COLUMNS = (
    ("parameter", "name t", ""),
    ("flushed", "", "share that is zero as scaled, or would be in FP16"),
    ("subnormal", "", "share that FP16 holds with fewer bits"),
    ("near top", "wide", "share above 65504/8"),
    ("smallest", "wide", "lowest exponent, as scaled"),
    ("median", "middle", "median exponent, as scaled"),
    ("largest", "wide", "highest exponent, as scaled"),
    ("culprit", "", "bad steps in which its gradient was not finite"),
    ("first", "wide", "bad steps in which it was the first culprit"),
    ("elements", "wide", "size of the parameter"),
)


def parameters(all_parameters: list[Parameter]) -> str:
    if not all_parameters:
        return ""
    heads = [
        f'<th class="{kind}" scope="col">'
        f'<button type="button" title="{remark}">{name}</button></th>'
        for name, kind, remark in _COLUMNS
    ]
    drawn = all_parameters[:MOST_PARAMETERS]
    left = len(all_parameters) - len(drawn)
    more = f" {left:,} more are not shown; the JSON report has all." if left else ""
    inside = f"""<label class="field">search
<input id="search" type="search" placeholder="part of a name" autocomplete="off"></label>
<span class="note" id="shown" aria-live="polite"></span>
{table("parameters", heads, map(_parameter, drawn), kind=' id="parameters"', tall=True)}"""
    lead = (
        "Worst first: most elements lost, or most often the first culprit. Click a column head to "
        f"sort, a name to see its histogram.{more}"
    )
    essence = f"{words.count(len(all_parameters), 'parameter')}, worst first"
    return section("Parameters", essence, inside, lead=lead, folded=False)


def _parameter(p: Parameter) -> str:
    name = link(breakable(p.name), parameter=p.name)
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
        f'<td{_kind(kind)} data-v="{"" if value is None else f"{value:.6g}"}">{escape(text)}</td>'
        for (value, text), (_, kind, _) in zip(cells, _COLUMNS[1:], strict=True)
    )
    return f'<tr><td class="name t">{name}</td>{rest}</tr>'


def _kind(name: str) -> str:
    return f' class="{name}"' if name else ""


def events(happened: list[story.EventRow], finding_at: Mapping[int, int], names: list[str]) -> str:
    """The list of events; `finding_at` has the position of the finding of a row's first step."""
    if not happened:
        none = absent("None: no step was skipped or retried.")
        return section("Events", "none", none)
    rows = [
        f"<tr{_span(row)}>"
        f"<td>{_where(row)}</td><td class=t>{escape(row.what)}</td>"
        f"<td class=t>{prose(row.text)}{_to_finding(row, finding_at, names)}</td></tr>"
        for row in happened
    ]
    heads = ("step", text_head("what"), text_head("description"))
    inside = table("events", heads, rows, kind=' id="events"', tall=True)
    return section("Events", words.count(len(happened), "row"), inside)


def _span(row: story.EventRow) -> str:
    return "" if row.first == row.last else f' data-last="{row.last}"'


def _where(row: story.EventRow) -> str:
    text = escape(words.where(row.first, row.last))
    return text if row.first is None else link(text, step=row.first)


def _to_finding(row: story.EventRow, finding_at: Mapping[int, int], names: list[str]) -> str:
    at = None if row.first is None or not row.cause else finding_at.get(row.first)
    return "" if at is None else f" ({link(f'finding {at + 1}', finding=names[at])})"


def settings(run: Run) -> str:
    facts = story.settings(run)
    known = story.versions(run)
    if not facts and not known:
        return ""
    inside = f'<div class="facts">{_facts(facts.items())}{_facts(known.items())}</div>'
    essence = ", ".join(f"{name} {value}" for name, value in known.items())
    return section("Settings and versions", essence if len(essence) < 90 else "", inside)


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{inside}</dl>" if inside else ""

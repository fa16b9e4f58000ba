"""Two runs on one page, aligned by step, with what differs first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...analysis import words
from ...analysis.diagnosis import diagnose
from ...analysis.totals import totals
from ...journal import Run
from ..charts import chart_data
from ..differences import differing_settings, partings, shared_steps, skipped_apart
from ..story import figures, verdict
from ..thinning import marks
from . import sections
from .document import document
from .markup import escape, link, listed, prose, section, table


def comparison(first: Run, second: Run, names: tuple[str, str]) -> str:
    """The page of two runs.

    >>> from gradlift.journal import Step
    >>> a, b = Run(steps=[Step(0, 8.0, 8.0)]), Run(steps=[Step(0, 4.0, 4.0)])
    >>> "They part at step 0: scale 2<sup>3</sup>" in comparison(a, b, ("a", "b"))
    True
    """
    together = _together(first, second, names)
    bad = marks(together)
    data = chart_data(together, [], bad)
    parted = partings(first, second)
    body = [
        _head(first, second, names),
        _verdicts(first, second, names),
        _parting(first, second, names),
        _settings(first, second, names),
        _figures(first, second, names),
    ]
    if together.steps:
        both = totals(together)
        body += [
            sections.thinned(data, both),
            sections.curves(data, bad, both, {w: _at(parted, w) for w in _CHARTS.values()}),
        ]
    return document(f"{names[0]} and {names[1]}: gradlift compare", "\n".join(body), data)


_CHARTS = {"scale": "scale", "loss": "loss", "gradient norm": "norm"}


def _at(parted: list[Any], chart: str) -> str:
    step = next((p.step for p in parted if _CHARTS.get(p.what) == chart), None)
    return "the same in both" if step is None else f"different from step {step:,} on"


def _together(first: Run, second: Run, names: tuple[str, str]) -> Run:
    """The steps of both as those of one run, under the names of the two as keys."""
    steps = []
    for run, name in zip((first, second), names, strict=True):
        steps += [s._replace(key=f"{name}: {s.key}" if s.key else name) for s in run.steps]
    return replace(Run(), steps=steps)


def _head(first: Run, second: Run, names: tuple[str, str]) -> str:
    parted = partings(first, second)
    shared = shared_steps(first, second)
    if not shared:
        sentence = "The runs have no step in common."
    elif not parted:
        sentence = f"Nothing differs in the {words.count(shared, 'step')} that both have."
    else:
        p = parted[0]
        sentence = f"They part at step {p.step:,}: {p.what} {p.first} and {p.second}."
    return f"""<header>
<p class="brand">gradlift compare</p>
<h1>{escape(names[0])} and {escape(names[1])}</h1>
<p class="verdict empty" id="verdict">{prose(sentence)}</p>
</header>"""


def _verdicts(first: Run, second: Run, names: tuple[str, str]) -> str:
    rows = []
    for run, name in zip((first, second), names, strict=True):
        severity, sentence = verdict(run, diagnose(run))
        text = f"<b>{escape(name)}</b>: {prose(sentence)}"
        rows.append(f'<p class="each {escape(severity)}">{text}</p>')
    return "\n".join(rows)


def _parting(first: Run, second: Run, names: tuple[str, str]) -> str:
    parted = partings(first, second)
    rows = [
        f"<tr><th scope=row>{escape(p.what)}{_of(p.key)}</th>"
        f"<td>{link(f'{p.step:,}', step=p.step)}</td>"
        f"<td>{prose(p.first)}</td><td>{prose(p.second)}</td></tr>"
        for p in parted
    ]
    heads = (sections.text_head("what"), "first step", *map(_name, names))
    inside = table("where they part", heads, rows) if rows else ""
    apart = []
    for steps, name in zip(skipped_apart(first, second), names, strict=True):
        if steps:
            links = listed([link(f"{step:,}", step=step) for step in steps])
            apart.append(f"<p class=note>Only {escape(name)} skipped: {links}</p>")
    shared = words.count(shared_steps(first, second), "step")
    essence = f"{shared} in both, aligned by number"
    return section("Where they part", essence, inside + "".join(apart), folded=not rows)


def _of(key: str) -> str:
    return f" (loss {escape(key)})" if key else ""


def _name(name: str) -> str:
    return f'<th scope="col">{escape(name)}</th>'


def _settings(first: Run, second: Run, names: tuple[str, str]) -> str:
    found = differing_settings(first, second)
    rows = [
        f"<tr><th scope=row>{escape(name)}</th><td class=t>{escape(a)}</td>"
        f"<td class=t>{escape(b)}</td></tr>"
        for name, a, b in found
    ]
    essence = f"{len(found)} differ" if found else "the same in both"
    heads = (sections.text_head("setting"), *map(sections.text_head, names))
    inside = table("settings that differ", heads, rows) if rows else ""
    return section("Settings", essence, inside, folded=not found)


def _figures(first: Run, second: Run, names: tuple[str, str]) -> str:
    rows = [
        f"<tr><th scope=row>{escape(what)}</th><td>{prose(a)}</td><td>{prose(b)}</td></tr>"
        for (what, a, _), (_, b, _) in zip(
            figures(totals(first)), figures(totals(second)), strict=True
        )
    ]
    heads = (sections.text_head("figure"), *map(_name, names))
    return section("Figures", "", table("figures", heads, rows), folded=False)

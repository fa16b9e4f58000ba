"""The report as one web page."""

from __future__ import annotations

from collections.abc import Sequence

from ...analysis.diagnosis import Finding, diagnose
from ...analysis.exponents import parameters
from ...analysis.totals import totals
from ...journal import Run
from ..charts import chart_data, identities
from ..modules import modules
from ..sampled import outputs, updates
from ..story import rows, title
from ..thinning import marks
from . import answer, sections
from .document import document
from .strip import frequent, strip


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
    data = chart_data(run, all_parameters, bad, findings)
    names = identities(findings)
    seen = {each["chart"] for each in data["findings"]}
    finding_at = {
        mark.first: names.index(name)
        for mark, name in zip(bad, data["marks"]["finding"], strict=True)
        if name
    }
    row = frequent(run, findings, data)
    body = [sections.head(run, findings), answer.findings(run, findings, data, row)]
    if run.steps:
        body.append(sections.figures(added))
    body.append(sections.looks(run, bool(findings)))
    if added.steps:
        body += [sections.thinned(data, added), sections.curves(data, bad, added)]
    body += [
        strip(run, findings, data),
        sections.forward(outputs(run), data["forward"], "forward" not in seen),
        sections.updates(updates(run), data["updates"], "updates" not in seen),
        sections.gradients(run, all_parameters),
        sections.heat(data["heat"], "heat" not in seen),
        sections.parameters(all_parameters),
        sections.inside(modules(run)),
        sections.events(rows(run, bad), finding_at, names),
        sections.settings(run),
    ]
    return document(f"{title(run)}: gradlift report", "\n".join(filter(None, body)), data)

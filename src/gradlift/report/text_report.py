"""The report as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ..analysis import words
from ..analysis.diagnosis import Finding, diagnose
from ..analysis.exponents import Parameter, parameters, quantile
from ..analysis.totals import Totals, totals
from ..journal import Run
from ..text import visible
from .charts import FORMATS, columns, sum_of
from .modules import Module, modules
from .story import figures, inside, looks, rows, settings, title, verdict, versions
from .thinning import marks

WIDTH = 80
MOST_PARAMETERS = 12
MOST_EVENTS = 20


def text(run: Run) -> str:
    """The whole report in plain text, 80 columns wide.

    >>> print(text(Run()).splitlines()[2])
    Nothing was recorded: this journal holds no step.
    """
    return report(run, diagnose(run))


def report(run: Run, findings: Sequence[Finding]) -> str:
    """The same, with findings that are already known."""
    added, all_parameters = totals(run), parameters(run)
    name = title(run)
    parts = [
        f"{name}\n{'=' * len(name)}\n{_filled(verdict(run, findings)[1])}",
        *map(_finding, findings),
        *([_headed("What was looked at", map(_filled, looks(run)))] if run.steps else []),
    ]
    if added.steps:
        parts += [_headed("Figures", _figures(added)), _headed("Scale", _curves(run))]
    if any(p.elements for p in all_parameters):
        parts.append(
            _headed("What the formats would do to these gradients", _fates(all_parameters))
        )
    if all_parameters:
        parts.append(_headed("Parameters, worst first", _parameters(all_parameters)))
    if inner := modules(run):
        parts.append(_headed("Between modules, least headroom first", _modules(inner)))
    happened = rows(run, marks(run))
    if happened:
        lines = [f"{words.where(r.first, r.last):>16}  {r.what:7} {r.text}" for r in happened]
        parts.append(_headed("Events", _some(lines, MOST_EVENTS)))
    for heading, facts in (("Settings", settings(run)), ("Versions", versions(run))):
        if facts:
            wide = max(map(len, facts))
            parts.append(_headed(heading, (f"{k:{wide}}  {v}" for k, v in facts.items())))
    return visible("\n\n".join(parts), keep="\n") + "\n"


def _figures(added: Totals) -> list[str]:
    return [f"{what:14}  {value:14}  {remark}".rstrip() for what, value, remark in figures(added)]


def _finding(finding: Finding) -> str:
    lines = [f"[{finding.severity}] {_placed(finding)}", finding.evidence]
    if finding.steps:
        lines.append("Steps: " + _listed(f"{step:,}" for step in finding.steps))
    if finding.parameters:
        lines.append("Parameters: " + _listed(finding.parameters))
    lines.append(finding.advice)
    first, *rest = (_filled(line) for line in lines if line)
    return "\n".join(
        [first, *(textwrap.indent(line, "  ") for line in (*rest, finding.diff) if line)]
    )


def _placed(finding: Finding) -> str:
    return f"{finding.title} ({finding.place})" if finding.place else finding.title


def _listed(things: Iterable[str], most: int = 8) -> str:
    shown = list(things)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _curves(run: Run) -> Iterable[str]:
    """The scale of each key as a row of blocks, one for each range of steps."""
    for key, steps in run.by_key.items():
        scales = columns(steps)["scale"]
        known = [v for v in scales if v == v]
        if known:
            name = f"{key}: " if key else ""
            yield f"{name}2^{min(known):g} to 2^{max(known):g}, the lowest of each range of steps"
            yield words.sparkline(scales, WIDTH - 4)


def _fates(all_parameters: Sequence[Parameter]) -> Iterable[str]:
    elements = sum(p.elements for p in all_parameters)
    states = {"true": sum_of(p.true for p in all_parameters)}
    states["as scaled"] = sum_of(p.scaled for p in all_parameters)
    yield f"{'':16}{'flushed':>12}{'subnormal':>12}{'overflowed':>12}"
    for state, counts in states.items():
        for format in FORMATS:
            shares = format.shares(counts, elements)
            yield f"{format.name:5}{state:11}" + "".join(f"{words.percent(s):>12}" for s in shares)
    zeros = sum(p.zeros for p in all_parameters) / elements
    yield f"Zeros are not counted here: {words.percent(zeros)} of the elements."


def _parameters(all_parameters: Sequence[Parameter]) -> list[str]:
    heads = f"{'flushed':>9}{'subnormal':>10}{'exponents':>12}{'median':>7}{'culprit':>8}  name"
    lines = [heads, *map(_parameter, all_parameters[:MOST_PARAMETERS])]
    left = len(all_parameters) - MOST_PARAMETERS
    return [*lines, f"  ... {left:,} more"] if left > 0 else lines


def _parameter(p: Parameter) -> str:
    if p.elements:
        shares = f"{words.percent(p.shares.flushed):>9}{words.percent(p.shares.subnormal):>10}"
    else:
        shares = f"{words.UNKNOWN:>9}{words.UNKNOWN:>10}"
    span = f"{min(p.scaled)}..{max(p.scaled)}" if p.scaled else words.UNKNOWN
    median = quantile(p.scaled, 0.5)
    middle = words.UNKNOWN if median is None else str(median)
    return f"{shares}{span:>12}{middle:>7}{p.culprit:>8}  {p.name}"


def _modules(found: Sequence[Module]) -> Iterable[str]:
    yield f"{'headroom':>9}{'zero':>9}{'subnormal':>10}{'near top':>9}{'lift':>7}  name"
    for m in found[:MOST_PARAMETERS]:
        bits, zero, subnormal, near, lift = inside(m, True)
        yield f"{bits:>9}{zero:>9}{subnormal:>10}{near:>9}{lift:>7}  {m.name}"
    if len(found) > MOST_PARAMETERS:
        yield f"  ... {len(found) - MOST_PARAMETERS:,} more"


def _headed(heading: str, lines: Iterable[str]) -> str:
    return "\n".join([heading, "-" * len(heading), *lines])


def _some(lines: list[str], most: int) -> list[str]:
    """The first and the last lines, and how many were left out between them."""
    if len(lines) <= most:
        return lines
    half = most // 2
    return [
        *lines[:half],
        f"  ... {len(lines) - most:,} more ...",
        *lines[len(lines) - most + half :],
    ]


def _filled(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, break_long_words=False, break_on_hyphens=False)

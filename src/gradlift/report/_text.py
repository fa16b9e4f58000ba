"""The report as plain text, and the ten lines at the end of a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from .. import _words as words
from .._diagnose import Finding, diagnose
from ..journal import Run
from ._charts import FORMATS, columns, sum_of
from ._modules import Module, modules
from ._parameters import Parameter, fate, parameters, quantile
from ._story import figures, inside, rows, settings, title, verdict, versions
from ._thinning import marks
from ._totals import Totals, keys, totals

WIDTH = 80
MOST_PARAMETERS = 12
MOST_EVENTS = 20
_BLOCKS = "▁▂▃▄▅▆▇█"


def text(run: Run) -> str:
    """The whole report in plain text, 80 columns wide.

    >>> print(text(Run()).splitlines()[2])
    Nothing was recorded: this journal holds no step.
    """
    return report(run, diagnose(run))


def summary(run: Run) -> str:
    """What came of a run, in ten lines at most.

    >>> from gradlift.journal import Step
    >>> print(summary(Run(steps=[Step(0, 8.0, 8.0, amax=2047.0)])).splitlines()[2])
    scale           2^3             between 2^3 and 2^3
    """
    added, findings = totals(run), diagnose(run)
    if not added.steps:
        return verdict(added, findings)[1]
    lines = _figures(added)
    lines += [_one_line(f"{f.severity}: {f.title}") for f in findings[: 10 - len(lines)]]
    return _visible("\n".join(lines if findings else [*lines, verdict(added, findings)[1]]))


def report(run: Run, findings: Sequence[Finding]) -> str:
    """The same, with findings that are already known."""
    added, all_parameters = totals(run), parameters(run)
    name = title(run)
    parts = [
        f"{name}\n{'=' * len(name)}\n{_filled(verdict(added, findings)[1])}",
        *map(_finding, findings),
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
    return _visible("\n\n".join(parts)) + "\n"


def _figures(added: Totals) -> list[str]:
    return [f"{what:14}  {value:14}  {remark}".rstrip() for what, value, remark in figures(added)]


def _finding(finding: Finding) -> str:
    lines = [f"[{finding.severity}] {finding.title}", finding.evidence]
    if finding.steps:
        lines.append("Steps: " + _listed(f"{step:,}" for step in finding.steps))
    if finding.parameters:
        lines.append("Parameters: " + _listed(finding.parameters))
    lines.append(finding.advice)
    first, *rest = (_filled(line) for line in lines if line)
    return "\n".join([first, *(textwrap.indent(line, "  ") for line in rest)])


def _listed(things: Iterable[str], most: int = 8) -> str:
    shown = list(things)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _curves(run: Run) -> Iterable[str]:
    """Each loss's scale as a row of blocks, one for each stretch of the run."""
    for key in keys(run.steps):
        scales = columns([s for s in run.steps if s.key == key])["scale"]
        cells = min(len(scales), WIDTH - 4)
        stretches = [
            scales[i * len(scales) // cells : (i + 1) * len(scales) // cells] for i in range(cells)
        ]
        lows = [min((v for v in s if v == v), default=math.nan) for s in stretches]
        known = [v for v in lows if v == v]
        if known:
            low, high = min(known), max(known)
            drawn = "".join(_block(v, low, high) for v in lows)
            yield (
                f"{key}: " if key else ""
            ) + f"2^{low:g} to 2^{high:g}, the lowest of each stretch"
            yield drawn


def _block(value: float, low: float, high: float) -> str:
    if value != value:
        return " "
    return _BLOCKS[round((value - low) / (high - low) * 7) if high > low else 3]


def _fates(all_parameters: Sequence[Parameter]) -> Iterable[str]:
    elements = sum(p.elements for p in all_parameters)
    states = {"true": sum_of(p.true for p in all_parameters)}
    states["as scaled"] = sum_of(p.scaled for p in all_parameters)
    yield f"{'':16}{'flushed':>12}{'subnormal':>12}{'overflowed':>12}"
    for state, counts in states.items():
        for format in FORMATS:
            shares = fate(counts, elements, format)
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
        shares = f"{words.percent(p.fate.flushed):>9}{words.percent(p.fate.subnormal):>10}"
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
    """The first and the last of them, and how many were left out between."""
    if len(lines) <= most:
        return lines
    half = most // 2
    return [
        *lines[:half],
        f"  ... {len(lines) - most:,} more ...",
        *lines[len(lines) - most + half :],
    ]


def _visible(said: str) -> str:
    """Names come from a script: what would steer a terminal is shown as a question mark."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said)


def _filled(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, break_long_words=False, break_on_hyphens=False)


def _one_line(sentence: str) -> str:
    return sentence if len(sentence) <= 100 else sentence[:97] + "..."

"""The doctor's answer in a terminal, as lines with a style.

screen    at most one screen, whatever was found
in_full   every finding with all that is known of it
summary   the last words of `gradlift run`
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..analysis import words
from ..analysis.diagnosis import Finding, diagnose
from ..analysis.findings.finding import of_a_log
from ..analysis.source import Source, line_at, source_of
from ..analysis.totals import totals
from ..journal import Run
from ..text import visible
from .story import figures, looks, verdict
from .thinning import Mark, streaks

HEIGHT = 23  # lines: a screen of 24, and the prompt
WIDTH = 80
_LEAD = 8  # columns: as wide as "warning "
_MOST_STREAKS = 100  # in full; --events has each step
_LONGEST = 10  # lines of a finding in a summary
_SHOWN = 5  # steps and parameters


class ScreenLine(NamedTuple):
    """A line of a terminal. Its style is "", "bold" or a severity, whose word begins the line.

    >>> ScreenLine("broken  Weights are not finite", "broken").style
    'broken'
    """

    text: str
    style: str = ""


@dataclass
class Block:
    """Lines that belong together; at least `least` stay when the screen is too small.

    >>> block = Block([ScreenLine("one two"), ScreenLine("three"), ScreenLine("four")], least=1)
    >>> block.cut(5, width=9)
    >>> block.lines
    [ScreenLine(text='one ...', style='')]
    """

    lines: list[ScreenLine]
    least: int
    more: Callable[[int], str] | None = None
    """The last line for so many that are left out; without it the last line ends in "..."."""

    def cut(self, excess: int, width: int) -> None:
        """Leaves out lines at the end: `excess`, if so many may go."""
        keep = max(self.least, len(self.lines) - excess)
        if keep >= len(self.lines):
            return
        left = self.lines[keep - 1 :]
        if self.more is not None:
            last = ScreenLine(self.more(len(left)))
        else:
            text = left[0].text[: width - 4]
            last = ScreenLine(
                text.rpartition(" ")[0] + " ..." if " " in text.strip() else text + "..."
            )
        self.lines[keep - 1 :] = [last]


def screen(run: Run, findings: Sequence[Finding], width: int = WIDTH) -> list[ScreenLine]:
    """Verdict, the first finding in full, the others a line each, skipped steps, what was looked
    at: in `HEIGHT` lines at most.

    >>> for line in screen(Run(), [])[:2]:
    ...     print(line.text)
    Nothing was recorded: this journal holds no step.
    0 steps, 0 skipped
    """
    head = Block(_sentence(run, findings, width), 1)
    parts = [
        Block(lines, least)
        for found in findings[:1]
        for lines, least in zip(_parts(found, source_of(run), width), (1, 1, 2, 3, 3))
    ]
    others = Block([_title(f, width) for f in findings[1:]], 3, _more_findings)
    lost = Block([ScreenLine(_streak(m)) for m in streaks(run)], 2, _more_streaks)
    seen = [Block(_wrapped(sentence, width), 1) for sentence in looks(run)]
    told = [head, Block([_counted(run), ScreenLine("")], 2), *parts, others]
    told += [Block([ScreenLine("")] * bool(findings), 1), lost, *seen, Block(_further(findings), 1)]
    for block in (lost, *seen[::-1], others, *(parts[i] for i in (2, 4, 3) if parts), head):
        block.cut(sum(len(b.lines) for b in told) - HEIGHT, width)
    return _safe([line for block in told for line in block.lines], width)


def in_full(run: Run, findings: Sequence[Finding], width: int = WIDTH) -> list[ScreenLine]:
    """Every finding with its evidence, steps, parameters, kind and confidence.

    >>> found = Finding("hint", "Odd scale", "It was 1000.", (7,), kind="odd-scale")
    >>> print(in_full(Run(), [found])[5].text)
            See step 7. Kind: odd-scale; likely.
    """
    lines = [*_sentence(run, findings, width), _counted(run), ScreenLine("")]
    source = source_of(run)
    for finding in findings:
        title, place, evidence, advice, change = _parts(finding, source, width)
        facts = f"{_where(finding)}Kind: {finding.kind}; {finding.confidence}."
        lines += [
            *title,
            *place,
            *evidence,
            *_indented(facts, width),
            *advice,
            *change,
            ScreenLine(""),
        ]
    lines += [line for sentence in looks(run) for line in _wrapped(sentence, width)]
    lost = Block([ScreenLine(_streak(m)) for m in streaks(run)], _MOST_STREAKS, _more_streaks)
    lost.cut(len(lost.lines), width)
    return _safe(lines + lost.lines, width)


def summary(run: Run) -> str:
    """The verdict, the first finding with its place and cure, and the figures of a run.

    >>> from gradlift.journal import Step
    >>> print(summary(Run(steps=[Step(0, 8.0, 8.0, amax=2047.0)])).splitlines()[0])
    Nothing wrong was found in what was recorded of 1 step.
    """
    added, findings = totals(run), diagnose(run)
    lines = _sentence(run, findings, WIDTH)
    if findings:
        parts = _parts(findings[0], source_of(run), WIDTH)
        first = Block([line for part in parts for line in part], 1)
        first.cut(len(first.lines) - _LONGEST, WIDTH)
        lines += first.lines
    if added.steps:
        lines += [
            ScreenLine(""),
            *(
                ScreenLine(f"{what:14}  {value:14}  {remark}")
                for what, value, remark in figures(added)
            ),
        ]
    return "\n".join(line.text.rstrip() for line in _safe(lines, WIDTH))


def _sentence(run: Run, findings: Sequence[Finding], width: int) -> list[ScreenLine]:
    return _wrapped(verdict(run, findings)[1], width, "bold")


def _counted(run: Run) -> ScreenLine:
    steps = words.count(len(run.steps), "logged step" if of_a_log(run) else "step")
    return ScreenLine(f"{steps}, {run.skipped:,} skipped")


def _parts(finding: Finding, source: Source, width: int) -> tuple[list[ScreenLine], ...]:
    """Title, the line of the script, evidence, advice, change of the script."""
    code = line_at(source, finding.place)
    shown = "" if finding.diff or code is None else f"{finding.place}: {code.strip()}"
    change = [ScreenLine(" " * _LEAD + line) for line in finding.diff.splitlines()]
    return (
        [_title(finding, width)],
        [ScreenLine(" " * _LEAD + shown)] if shown else [],
        _indented(finding.evidence, width),
        _indented(f"-> {finding.advice}" if finding.advice else "", width),
        change,
    )


def _title(finding: Finding, width: int) -> ScreenLine:
    place = f"  {finding.place}" if finding.place else ""
    room = max(20, width - _LEAD - len(place))
    title = finding.title if len(finding.title) <= room else finding.title[: room - 3] + "..."
    return ScreenLine(f"{finding.severity:{_LEAD}}{title}{place}", finding.severity)


def _where(finding: Finding) -> str:
    """Steps and parameters, as a sentence."""
    parts = []
    if finding.steps:
        name = "step" if len(finding.steps) == 1 else "steps"
        parts.append(f"{name} {_listed(map(str, finding.steps))}")
    if finding.parameters:
        parts.append(_listed(finding.parameters))
    return f"See {'; '.join(parts)}. " if parts else ""


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (", ..." if len(every) > _SHOWN else "")


def _streak(mark: Mark) -> str:
    one = mark.first == mark.last
    at = f"step {mark.first}" if one else f"steps {mark.first}-{mark.last}"
    n = "" if one else f", {mark.times:,} steps"
    return f"skipped {at}: {mark.cause}{n}" + (f" [{mark.key}]" if mark.key else "")


def _more_streaks(left: int) -> str:
    return f"... and {left:,} more; --events shows each"


def _more_findings(left: int) -> str:
    return f"... and {words.count(left, 'more finding')}"


def _further(findings: Sequence[Finding]) -> list[ScreenLine]:
    """Which commands say more."""
    kinds = [f"gradlift explain {f.kind}" for f in findings[:1] if f.kind]
    return [ScreenLine(f"More: {'; '.join([*kinds, 'gradlift doctor -v'])}")] if findings else []


def _wrapped(text: str, width: int, style: str = "", indent: str = "") -> list[ScreenLine]:
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [ScreenLine(line, style) for line in lines]


def _indented(text: str, width: int) -> list[ScreenLine]:
    return _wrapped(text, width, indent=" " * _LEAD)


def _short(text: str, width: int, style: str = "") -> ScreenLine:
    return ScreenLine(text if len(text) <= width else text[: width - 3] + "...", style)


def _safe(lines: list[ScreenLine], width: int) -> list[ScreenLine]:
    return [_short(visible(line.text), width, line.style) for line in lines]

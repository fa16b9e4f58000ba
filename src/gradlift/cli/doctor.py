"""gradlift doctor: what is wrong with a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..analysis.coverage import coverage
from ..analysis.diagnosis import SEVERITIES, Finding, diagnose
from ..analysis.words import cause, power
from ..journal import Event, Run, Step, read_journal
from ..report.story import looks, verdict
from ..text import visible

_STYLES = {"broken": "bold red", "warning": "bold yellow", "hint": "bold cyan"}
_MOST_LINES = 6  # of skipped steps, so that the answer stays on the screen
_NOT_APPLIED = ("skip", "retry", "halt")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Findings and events as JSON.")
@click.option("--events", "every_event", is_flag=True, help="A line for each skipped step.")
@click.option("-v", "--verbose", is_flag=True, help="Steps, parameters and how certain it is.")
@click.option(
    "--fail-on",
    type=click.Choice(["broken", "warning", "hint"]),
    default="broken",
    show_default=True,
    help="The exit status is 1 for findings of this severity or worse.",
)
def doctor(run: Path, as_json: bool, every_event: bool, verbose: bool, fail_on: str) -> None:
    """Print what is wrong with RUN (a journal or a run's folder), most serious first.

    The exit status is 0 if nothing of the severity of --fail-on was found, 1 if something was, and
    2 if RUN cannot be read.
    """
    read = read_journal(run)
    findings = diagnose(read)
    if as_json:
        click.echo(json.dumps(_plain(read, findings, _not_applied(read)), indent=1))
    else:
        _print(read, findings, every_event, verbose)
    worst = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    sys.exit(1 if any(f.severity in worst for f in findings) else 0)


def _not_applied(run: Run) -> list[dict[str, Any]]:
    """Every skip, retry and halt: its step, cause, scale and culprits."""
    return [_of(event) for event in run.events if event.what in _NOT_APPLIED]


def _of(event: Event) -> dict[str, Any]:
    detail = event.detail
    return {
        "step": event.step,
        "what": event.what,
        "cause": cause(detail.get("cause", "")),
        "scale": detail.get("scale"),
        "next_scale": detail.get("next_scale"),
        "culprits": [str(c) for c in detail.get("culprits") or ()],
        "micro_batch": detail.get("micro_batch"),
        "key": detail.get("key", ""),
    }


def _plain(run: Run, findings: list[Finding], events: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "run": visible(str(run.path)),
        "steps": len(run.steps),
        "skipped": run.skipped,
        "broken": any(f.severity == "broken" for f in findings),
        "findings": [f._asdict() for f in findings],
        "looked_at": coverage(run).looked,
        "not_looked_at": coverage(run).not_looked,
        "events": events,
    }


def _print(run: Run, findings: list[Finding], every_event: bool, verbose: bool) -> None:
    console = Console(highlight=False)
    console.print(Text(verdict(run, findings)[1], "bold"))
    console.print(Text(f"{len(run.steps)} steps, {run.skipped} skipped\n"))
    for finding in findings:
        console.print(Text(f"{finding.severity:8}", _STYLES[finding.severity]), end="")
        place = f"  {finding.place}" if finding.place else ""
        console.print(Text(finding.title, "bold") + Text(place, "underline"))
        shown = [finding.evidence]
        if verbose:
            shown += [_where(finding), f"{finding.kind}, {finding.confidence}"]
        for part in (*shown, f"-> {finding.advice}" if finding.advice else ""):
            if part:
                console.print(Padding(Text(part), (0, 0, 0, 8)))
        console.print()
    for line in looks(run):
        console.print(Text(line))
    if every_event:
        for event in _not_applied(run):
            console.print(Text(_line(event)), soft_wrap=True)
    elif run.skipped:
        for line in _streaks(run):
            console.print(Text(line), soft_wrap=True)


def _streaks(run: Run) -> list[str]:
    """Skipped steps: those in a row that have one cause share a line."""
    lines = []
    for key, steps in run.by_key.items():
        name = f" [{key}]" if key else ""
        streak: list[Step] = []
        for step in [*steps, None]:
            if step is not None and step.skipped and (not streak or step.cause is streak[-1].cause):
                streak.append(step)
                continue
            if streak:
                at = _steps(streak[0].step, streak[-1].step)
                n = f", {len(streak)} steps" if len(streak) > 1 else ""
                lines.append(f"skipped {at}: {streak[0].cause}{n}{name}")
            streak = [step] if step is not None and step.skipped else []
    if len(lines) > _MOST_LINES:
        more = f"... and {len(lines) - _MOST_LINES + 1} more; --events shows each"
        lines = [*lines[: _MOST_LINES - 1], more]
    return lines


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _where(finding: Finding) -> str:
    steps = ", ".join(map(str, finding.steps[:5])) + (", ..." if len(finding.steps) > 5 else "")
    parts = [f"steps {steps}"] if finding.steps else []
    if finding.parameters:
        parts.append(", ".join(finding.parameters[:3]) + (", ..." * (len(finding.parameters) > 3)))
    return "See " + "; ".join(parts) if parts else ""


def _line(event: dict[str, Any]) -> str:
    step = "?" if event["step"] is None else event["step"]
    line = f"step {step:>7}  {event['what']:5}  {event['cause']}"
    if isinstance(event["scale"], (int, float)):
        line += f" at {power(event['scale'])}"
        if isinstance(event["next_scale"], (int, float)) and event["next_scale"] != event["scale"]:
            line += f" -> {power(event['next_scale'])}"
    if event["culprits"]:
        more = len(event["culprits"]) - 1
        line += f": {event['culprits'][0]}" + (f" and {more} more" if more else "")
    if event["micro_batch"] is not None:
        line += f", micro-batch {event['micro_batch']}"
    return line + (f" [{event['key']}]" if event["key"] else "")

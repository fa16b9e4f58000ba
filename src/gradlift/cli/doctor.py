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

from ..analysis.diagnosis import Finding, diagnose
from ..analysis.words import cause, power
from ..journal import Event, Run, read_journal
from ..text import visible

_STYLES = {"broken": "bold red", "warning": "bold yellow", "hint": "bold cyan"}
_NOT_APPLIED = ("skip", "retry", "halt")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Findings and events as JSON.")
def doctor(run: Path, as_json: bool) -> None:
    """Print what is wrong with RUN (a journal or a run's folder), most serious first.

    The exit status is 1 if training is broken.
    """
    read = read_journal(run)
    findings = diagnose(read)
    events = _not_applied(read)
    if as_json:
        click.echo(json.dumps(_plain(read, findings, events), indent=1))
    else:
        _print(read, findings, events)
    sys.exit(1 if any(f.severity == "broken" for f in findings) else 0)


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
        "events": events,
    }


def _print(run: Run, findings: list[Finding], events: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    console.print(Text(f"{len(run.steps)} steps, {run.skipped} skipped\n"))
    for finding in findings:
        console.print(Text(f"{finding.severity:8}", _STYLES[finding.severity]), end="")
        console.print(Text(finding.title, "bold"))
        for part in (finding.evidence, _where(finding), f"-> {finding.advice}"):
            if part:
                console.print(Padding(Text(part), (0, 0, 0, 8)))
        console.print()
    if not findings:
        console.print(Text("Nothing is wrong with this run, as far as its journal shows.\n"))
    for event in events:
        console.print(Text(_line(event)), soft_wrap=True)


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

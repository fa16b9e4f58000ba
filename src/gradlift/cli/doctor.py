"""gradlift doctor: what is wrong with a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from ..analysis.diagnosis import SEVERITIES, diagnose
from ..analysis.words import power
from ..logs import FORMATS, read_run
from ..report.doctor_json import SCHEMA, doctor_json, not_applied
from ..report.screen import ScreenLine, in_full, screen

_STYLES = {"broken": "bold red", "warning": "bold yellow", "hint": "bold cyan", "bold": "bold"}
_LEAST_WIDTH = 40
Command = TypeVar("Command", bound=Callable[..., Any])


def log_options(command: Command) -> Command:
    """Adds --format and --pattern, which say how a log is read.

    >>> @log_options
    ... def read(log_format, pattern): ...
    >>> [option.name for option in read.__click_params__]
    ['pattern', 'log_format']
    """
    formats = click.option(
        "--format",
        "log_format",
        type=click.Choice([each.name for each in FORMATS]),
        help="The format of a log, where it is not recognised.",
    )
    pattern = click.option(
        "--pattern",
        help=r"An expression for a log's lines: 'step (?P<step>\d+).*loss (?P<loss>\S+)'.",
    )
    return formats(pattern(command))


def _print_schema(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(SCHEMA.read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--json", "as_json", is_flag=True, help="Findings and events as JSON.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="The JSON Schema of --json; RUN is not needed.",
)
@click.option("--events", "every_event", is_flag=True, help="A line for each skipped step.")
@log_options
@click.option("-v", "--verbose", is_flag=True, help="Every finding in full.")
@click.option(
    "--fail-on",
    type=click.Choice(["broken", "warning", "hint"]),
    default="broken",
    show_default=True,
    help="The exit status is 1 for findings of this severity or worse.",
)
def doctor(
    runs: tuple[Path, ...],
    as_json: bool,
    every_event: bool,
    log_format: str | None,
    pattern: str | None,
    verbose: bool,
    fail_on: str,
) -> None:
    """Print what is wrong with RUN, most serious first.

    RUN is a journal, a run's folder, or the log of another trainer: its console's output, a
    trainer_state.json, a table, TensorBoard's files. Several logs are those of one run.

    That is one screen at most; -v shows every finding in full, --events each skipped step.

    The exit status is 0 if nothing of the severity of --fail-on was found, 1 if something was, and
    2 if RUN cannot be read.
    """
    read = read_run(runs, format=log_format, pattern=pattern)
    findings = diagnose(read)
    if as_json:
        click.echo(json.dumps(doctor_json(read, findings), indent=1, allow_nan=False))
    else:
        console = Console(highlight=False)
        width = max(_LEAST_WIDTH, console.width)
        for line in (in_full if verbose else screen)(read, findings, width):
            console.print(_styled(line), soft_wrap=True)
        for event in not_applied(read) if every_event else ():
            console.print(Text(_line(event)), soft_wrap=True)
    worst = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    sys.exit(1 if any(f.severity in worst for f in findings) else 0)


def _styled(line: ScreenLine) -> Text:
    """A severity has a colour on a terminal; the title behind it is bold."""
    if line.style not in SEVERITIES:
        return Text(line.text, line.style)
    severity, rest = line.text[: len(line.style)], line.text[len(line.style) :]
    return Text.assemble((severity, _STYLES[line.style]), (rest, "bold"))


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

"""gradlift report: a recorded run as a page, as text, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .. import report as reports
from ..errors import GradliftError
from ..journal import JOURNAL
from ..logs import read_run
from ..observe.folder import write_file
from ..report.private import without_source
from ..text import visible
from .doctor import log_options


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--text", "form", flag_value="text", help="Plain text instead of a web page.")
@click.option("--json", "form", flag_value="json", help="JSON instead of a web page.")
@click.option("--no-source", is_flag=True, help="Leave out code, lines, command and paths.")
@log_options
def report(
    run: Path,
    output: Path | None,
    form: str | None,
    no_source: bool,
    log_format: str | None,
    pattern: str | None,
) -> None:
    """Write the report of RUN: a journal, a run's folder, or the log of another trainer.

    A web page is written beside the journal unless -o names a file; text and JSON are printed.
    """
    recorded = read_run(run, format=log_format, pattern=pattern)
    journal = recorded.path or run
    if no_source:
        recorded = without_source(recorded)
    if form == "text":
        made = reports.text(recorded)
    elif form == "json":
        made = json.dumps(reports.as_json(recorded), indent=2) + "\n"
    else:
        made = reports.html(recorded)
    target = output or (None if form else beside(journal))
    if target is None:
        click.echo(made, nl=False)
        return
    try:
        if output is None:
            write_file(target, made)
        else:
            target.write_text(made, encoding="utf-8")
    except OSError as error:
        raise GradliftError(f"cannot write {target}: {error.strerror}") from error
    click.echo(f"report: {visible(str(target))}")


def beside(journal: Path) -> Path:
    """The path of a journal's page.

    >>> beside(Path("runs/a/journal.jsonl")).as_posix(), beside(Path("old.jsonl")).as_posix()
    ('runs/a/report.html', 'old.html')
    >>> beside(Path("run.1")).as_posix()
    'run.1.html'
    """
    if journal.name == JOURNAL:
        return journal.with_name("report.html")
    name = journal.name.removesuffix(".jsonl")  # else the pages of run.1 and run.2 were one
    return journal.with_name(f"{name}.html")

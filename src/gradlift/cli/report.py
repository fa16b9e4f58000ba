"""gradlift report: a recorded run as a page, as text, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .. import report as reports
from ..errors import GradliftError
from ..journal import JOURNAL, read_journal


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--text", "form", flag_value="text", help="Plain text instead of a web page.")
@click.option("--json", "form", flag_value="json", help="JSON instead of a web page.")
def report(run: Path, output: Path | None, form: str | None) -> None:
    """Draw the report of RUN, a journal or a run's folder.

    A web page is written beside the journal unless -o says otherwise; text and JSON are printed.
    """
    recorded = read_journal(run)
    if form == "text":
        made = reports.text(recorded)
    elif form == "json":
        made = json.dumps(reports.as_json(recorded), indent=2) + "\n"
    else:
        made = reports.html(recorded)
        output = output or beside(recorded.path or run)
    if output is None:
        click.echo(made, nl=False)
        return
    try:
        output.write_text(made, encoding="utf-8")
    except OSError as error:
        raise GradliftError(f"cannot write {output}: {error.strerror}") from error
    click.echo(f"report: {output}")


def beside(journal: Path) -> Path:
    """Where a journal's page belongs.

    >>> beside(Path("runs/a/journal.jsonl")).as_posix(), beside(Path("old.jsonl")).as_posix()
    ('runs/a/report.html', 'old.html')
    """
    if journal.name == JOURNAL:
        return journal.with_name("report.html")
    return journal.with_suffix(".html")

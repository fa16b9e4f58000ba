"""gradlift compare: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..analysis import words
from ..analysis.totals import Totals, totals
from ..errors import GradliftError
from ..journal import Run
from ..logs import read_run
from ..report.page.comparison import comparison
from ..report.story import title
from ..text import visible
from .doctor import log_options


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="Write a page of two runs here.")
@log_options
def compare(
    runs: tuple[Path, ...], html: Path | None, log_format: str | None, pattern: str | None
) -> None:
    """Print the figures of RUNS side by side: scale, skips, loss, flushed share, step time.

    With --html FILE, two runs on one page: what differs first, and their charts on each other.
    """
    if len(runs) < 2:
        raise click.UsageError("compare needs two runs or more; `gradlift report` shows one")
    if html is not None and len(runs) != 2:
        raise click.UsageError(f"--html shows two runs, and {len(runs)} were given")
    recorded = [read_run(run, format=log_format, pattern=pattern) for run in runs]
    if html is not None:
        first, second = names(recorded)
        try:
            html.write_text(comparison(recorded[0], recorded[1], (first, second)), encoding="utf-8")
        except OSError as error:
            raise GradliftError(f"cannot write {html}: {error.strerror}") from error
        click.echo(f"report: {visible(str(html))}")
        return
    Console().print(side_by_side(recorded, names(recorded)))


def names(runs: Sequence[Run]) -> list[str]:
    """Titles of runs; the path where two have the same title.

    >>> a, b = Run(path=Path("x/run/journal.jsonl")), Run(path=Path("y/run/journal.jsonl"))
    >>> names([a, b]) == [str(a.path), str(b.path)], names([a])
    (True, ['run'])
    """
    short = [title(run) for run in runs]
    return [
        name if short.count(name) == 1 else visible(str(run.path))
        for run, name in zip(runs, short, strict=True)
    ]


def side_by_side(runs: Sequence[Run], titles: Sequence[str]) -> Table:
    """One column a run, one row a figure."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in titles:
        table.add_column(Text(name), justify="right", overflow="fold")
    columns = [[*_settings(run), *_figures(totals(run))] for run in runs]
    for rows in zip(*columns, strict=True):
        table.add_row(rows[0][0], *(Text(value) for _, value in rows))
    return table


def _settings(run: Run) -> list[tuple[str, str]]:
    return [("rule", str(run.header.get("rule") or words.UNKNOWN))]


def _figures(added: Totals) -> list[tuple[str, str]]:
    return [
        ("steps", f"{added.steps:,}"),
        ("skipped", f"{added.skipped:,}"),
        ("causes", words.counted(added.causes) or "none"),
        ("retries", f"{added.retries:,}"),
        ("without gradients", f"{added.without_gradients:,}"),
        ("undecided", f"{added.undecided:,}"),
        ("first scale", words.power(added.first_scale)),
        ("last scale", words.power(added.last_scale)),
        ("lowest scale", words.power(added.lowest_scale)),
        ("highest scale", words.power(added.highest_scale)),
        ("worst headroom", words.bits(added.worst_headroom)),
        ("flushed", words.percent(added.flushed)),
        ("first loss", words.number(added.first_loss)),
        ("last loss", words.number(added.last_loss)),
        ("step time", words.duration(added.step_seconds)),
    ]

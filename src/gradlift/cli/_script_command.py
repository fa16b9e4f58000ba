"""What `run` and `profile` share: a script's own command line, a run's folder, an ending."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .. import _folder, _script
from .._find_scale import find_scale
from ..errors import GradliftError, JournalWarning
from ..journal import JOURNAL, Journal, Sink, read_journal
from ._status import Status

Watch = Callable[[Journal], Callable[[], None]]
"""Begins to record to a journal; what it returns is called at the end."""


class ScriptCommand(click.Command):
    """gradlift's options come before the script; what follows its path, or -m, is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            option
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for option in parameter.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 2 if args[at] in valued else 1
        if at < len(args) and args[at] != "--":
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


def options(function: Any) -> Any:
    for decorate in reversed(
        (
            click.argument("command", nargs=-1, type=click.UNPROCESSED),
            click.option("--runs-dir", default="gradlift-runs", show_default=True, type=Path),
            click.option("--name", help="Name of the run's folder. [default: script and time]"),
            click.option("--no-report", is_flag=True, help="Record only."),
            click.option("-q", "--quiet", is_flag=True, help="No status line, no summary."),
        )
    ):
        function = decorate(function)
    return function


def carry_out(
    command: Sequence[str],
    watch: Watch,
    *,
    mode: str,
    every: int,
    runs_dir: Path,
    name: str | None,
    no_report: bool,
    quiet: bool,
) -> None:
    """Runs the script, watched from the moment it has torch, and ends as it ended."""
    stem = _script.check(command)
    rank = _folder.rank()
    runs = runs_dir.absolute()  # the script may change the directory
    folder, word = None, None
    if rank == 0:
        folder = _folder.make(stem, runs, name, command)
        if _folder.world_size() > 1:
            word = _folder.share(folder, runs)
    status = Status(quiet or rank > 0)
    at_end: list[Callable[[], None]] = []

    def begin() -> None:
        here = folder or _folder.shared(runs)
        also: list[Sink] = [status] if rank == 0 else []
        journal = Journal(_folder.journal_of(here, rank), also=also)
        world = _folder.world_size()
        journal.describe(mode=mode, command=list(command), every=every, world_size=world)
        at_end.extend((watch(journal), journal.close))

    process = os.getpid()
    ending = _script.run(command, once_torch_is_there=begin)
    ending.show()
    if os.getpid() != process:  # a child that the script has forked: its end is not the run's
        ending.leave()
    for finish in at_end:
        finish()
    if word is not None:
        word.unlink(missing_ok=True)
    if folder is not None:
        _tell(folder, bool(at_end), no_report, quiet, ending)
    ending.leave()


def _tell(
    folder: Path, torch_was_there: bool, no_report: bool, quiet: bool, ending: _script.Ending
) -> None:
    if not torch_was_there:
        if ending.well:
            raise GradliftError("the script never imported torch: there was nothing to record")
        return
    if (quiet and no_report) or not (folder / JOURNAL).exists():
        return
    from .. import report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JournalWarning)
        run = read_journal(folder)
    if not no_report:
        (folder / _folder.REPORT).write_text(report.html(run), encoding="utf-8")
    if not quiet:
        shown = folder / (JOURNAL if no_report else _folder.REPORT)
        lines = ["", report.summary(run)]
        if run.header.get("mode") == "profile":
            lines.append(find_scale(run).reason)
        what = "recorded" if no_report else "report"
        click.echo("\n".join([*lines, f"{what}: {shown}"]), err=True)
    sys.stderr.flush()

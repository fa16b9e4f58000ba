"""gradlift run: runs a script unchanged, records it and writes a report."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import click

from ..analysis.static_scale import find_scale
from ..errors import GradliftError, JournalWarning
from ..journal import JOURNAL, Journal, Run, Sink, read_journal
from ..observe import folder as _folder
from ..observe import script as _script
from ..observe.stopping import Stopper
from ..rules import parse
from ..session import RUNS, Session
from ..text import visible
from ._status import Status


class ScriptCommand(click.Command):
    """Options before the script are gradlift's; those after its path, or after -m, the script's."""

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


@click.command(cls=ScriptCommand)
@click.option("--rule", help='Another rule than the script\'s: "auto", "megatron", ...')
@click.option(
    "--every", default=50, show_default=True, type=click.IntRange(min=1), help="Steps per sample."
)
@click.option(
    "--no-rerun",
    is_flag=True,
    help="Once a loss is not finite, do not run its forward pass again to find the cause.",
)
@click.option(
    "--stop-on",
    type=click.Choice(["broken"]),
    help="End a run that cannot recover, with exit status 1. [default: never]",
)
@click.option("--no-source", is_flag=True, help="Do not record lines of the script's code.")
@click.option("--apex", is_flag=True, help="`import apex` gives gradlift's amp and fp16_utils.")
@click.option("--runs-dir", default=RUNS, show_default=True, type=Path)
@click.option("--name", help="Name of the run's folder. [default: script and time]")
@click.option("--no-report", is_flag=True, help="Record only.")
@click.option("-q", "--quiet", is_flag=True, help="No status line, no summary.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...],
    rule: str | None,
    every: int,
    no_rerun: bool,
    stop_on: str | None,
    no_source: bool,
    apex: bool,
    runs_dir: Path,
    name: str | None,
    no_report: bool,
    quiet: bool,
) -> None:
    """Run a script unchanged, record its steps and write a report.

    \b
    gradlift run train.py --lr 3e-4
    gradlift run --rule auto -m package.train --epochs 3
    gradlift run --apex old_train.py --opt-level O2

    Output, weights, optimizer state and random numbers equal those of the plain run, to the bit.
    Only --rule changes the run: gradlift's scaler is used instead of torch's, with that rule.

    --stop-on broken ends a run of which 50 steps in a row were lost: the loss or the gradients were
    not finite at any scale. Weights that are not finite end it after 20.
    """
    if rule is not None:
        parse(rule)
    if apex:
        from ..observe.apex_import import stand_in

        stand_in(quiet)
    stem = _script.check(command)
    rank, world = _folder.rank(), _folder.world_size()
    runs = runs_dir.absolute()  # the script may change the directory
    folder = _folder.make(stem, runs, name, command) if rank == 0 else _folder.shared(runs)
    pointer = _folder.share(folder, runs) if rank == 0 and world > 1 and folder else None
    sinks: list[Sink] = [Status(quiet)] if rank == 0 else []
    stopper = Stopper()
    if stop_on is not None:
        sinks.append(stopper)
    journal = Journal(_folder.journal_of(folder, rank), also=sinks)
    journal.describe(mode="run", command=list(command), every=every, world_size=world)
    session = Session(
        journal,
        every=every if rank == 0 else None,
        rule=rule,
        rerun=not no_rerun,
        source=not no_source,
    )
    process = os.getpid()
    with session:
        ending = _script.run(command)
        stopper.over = True
        if stopper.stopped and ending.well:  # the script has caught it
            ending.status = 1
        ending.show()
        if os.getpid() != process:  # a child that the script has forked: its end is not the run's
            ending.leave()
        session.end(ending.error, ending.status)
    if pointer is not None:
        pointer.unlink(missing_ok=True)
    if rank == 0 and folder is not None:
        _tell(folder, session, no_report, quiet, ending, stopper.stopped)
    ending.leave()


def _tell(
    folder: Path,
    session: Session,
    no_report: bool,
    quiet: bool,
    ending: _script.Ending,
    stopped: str,
) -> None:
    if not {"torch", "jax", "keras"} & set(sys.modules) and not session.recorded:
        if ending.well:
            raise GradliftError("the script never imported torch: there was nothing to record")
        return
    if quiet and no_report and not stopped:
        return
    from .. import report
    from ..analysis.diagnosis import diagnose
    from ..report.screen import screen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JournalWarning)
        run = read_journal(folder)
    if not no_report:
        _folder.write_file(folder / _folder.REPORT, report.html(run))
    shown = folder / (JOURNAL if no_report else _folder.REPORT)
    where = f"{'recorded' if no_report else 'report'}: {shown}"
    if stopped:
        answer = [line.text for line in screen(run, diagnose(run))]
        lines = [where, "", f"gradlift has stopped this run: {stopped}.", *answer]
    else:
        lines = [*_summary(run, session.what_was_seen), where]
    if stopped or not quiet:
        click.echo(visible("\n".join(["", *lines]), keep="\n"), err=True)
    sys.stderr.flush()


def _summary(run: Run, seen: str) -> list[str]:
    """The summary of a run, and which static scale would fit if nothing was scaled."""
    from .. import report

    if not run.steps:
        return [seen]
    advice = [find_scale(run).reason] if run.header.get("rule") == "off" else []
    return [report.summary(run), *([seen] if seen else []), *advice]

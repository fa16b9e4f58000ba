"""gradlift watch: shows a running job, from another shell."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..analysis.diagnosis import Finding
from ..analysis.words import bits, duration, number, percent, power, sparkline
from ..errors import JournalError
from ..logs import read_run
from ..text import visible
from ._view import FindingsSoFar, Frame, Lane, Tail
from .doctor import log_options

_COLOURS = {"broken": "bold red", "warning": "bold yellow", "hint": "cyan"}


@click.command()
@click.argument("run", type=click.Path())
@click.option("--once", is_flag=True, help="Print once and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@log_options
def watch(
    run: str, once: bool, interval: float, log_format: str | None, pattern: str | None
) -> None:
    """Show a running job. RUN is its folder, its journal or its log. Ctrl-C ends."""
    tail = Tail(run, format=log_format, pattern=pattern)
    doctor = FindingsSoFar(run, format=log_format, pattern=pattern)
    console = Console()
    if once:
        if not tail.look():
            raise JournalError(f"cannot read {run}: there is no journal yet")
        if tail.of_log and not tail.view.frame(0.0).lanes:
            read_run(run, format=log_format, pattern=pattern)  # raises if it is no log at all
        console.print(_now(tail, doctor, run))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                found = tail.look()
                live.update(_now(tail, doctor, run) if found else waiting(run), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        pass  # the usual end


def _now(tail: Tail, doctor: FindingsSoFar, run: str) -> RenderableType:
    return drawn(tail.view.frame(_age(tail)), run, doctor.look(tail.read))


def _age(tail: Tail) -> float:
    return max(0.0, time.time() - tail.changed)


def waiting(run: str) -> Text:
    """What is shown before there is a journal."""
    return Text(f"waiting for {visible(run)}: there is no journal yet")


def drawn(frame: Frame, run: str, findings: Sequence[Finding] = ()) -> RenderableType:
    """A frame as text and tables. Names are never parsed as markup."""
    kind = "log of" if frame.header.get("mode") == "log" else "rule"
    formats = ", ".join(map(str, frame.header.get("formats") or ()))
    rule = formats or str(frame.header.get("rule", "unknown"))
    parts: list[RenderableType] = [
        Text(visible(run), style="bold", no_wrap=True, overflow="ellipsis"),
        Text(f"{kind} {visible(rule)}{_speed(frame)}"),
        _lanes(frame.lanes) if frame.lanes else Text("\nno steps yet\n"),
        *map(_history, frame.lanes),
        _skips(frame),
        *map(_finding, findings),
    ]
    if frame.culprits:
        times = [(name, str(n)) for name, n in frame.culprits]
        parts.append(_table("most often the first culprit", ["times"], times))
    if frame.worst:
        title = f"most flushed, at step {frame.sampled}"
        rows = [(name, percent(lost), percent(thin)) for name, lost, thin in frame.worst]
        parts.append(_table(title, ["flushed", "subnormal"], rows))
    parts.append(_age_line(frame))
    return Group(*parts)


def _speed(frame: Frame) -> str:
    return f", {frame.rate:.3g} steps/s" if frame.rate > 0 else ""


def _lanes(lanes: list[Lane]) -> Table:
    keys = any(lane.key for lane in lanes)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in (["loss of"] if keys else []) + ["step", "scale", "loss", "norm", "headroom"]:
        table.add_column(title, justify="left" if title == "loss of" else "right", no_wrap=True)
    for title in ("lr", "skipped"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in lanes:
        last = lane.last
        table.add_row(
            *([Text(lane.key or "-")] if keys else []),
            str(last.step),
            power(last.next_scale),
            number(last.loss),
            number(last.norm),
            bits(last.headroom()),
            number(last.lr),
            f"{lane.skipped} of {lane.steps}",
        )
    return table


def _history(lane: Lane) -> Text:
    """The scale over the whole run, between its lowest and its highest."""
    known = [e for e in lane.trail if math.isfinite(e)]
    span = f"2^{min(known):g} to 2^{max(known):g}" if known else "unknown"
    return Text(f"scale so far {sparkline(lane.trail, 40)} {span} {lane.key}".rstrip())


def _skips(frame: Frame) -> Text:
    causes = ", ".join(f"{n} {cause}" for cause, n in frame.causes.items())
    line = Text(f"skipped: {causes or 'none'}", style="yellow" if causes else "")
    if frame.retries:
        line.append(f"; retried: {frame.retries}")
    if frame.resumes:
        line.append(f"; resumed: {frame.resumes}")
    if frame.damaged:
        line.append(f"; damaged lines: {frame.damaged}")
    return line


def _finding(finding: Finding) -> Text:
    """Severity, title, place; the first line of what to do."""
    place = f"  {visible(finding.place)}" if finding.place else ""
    line = Text.assemble(
        (f"{finding.severity:8}", _COLOURS[finding.severity]),
        (visible(finding.title), "bold"),
        place,
    )
    if finding.advice:
        line.append(f"\n        -> {visible(finding.advice)}", style="dim")
    return line


def _table(title: str, columns: list[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(title, no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows:
        table.add_row(Text(name), *cells)
    return table


def _age_line(frame: Frame) -> Text:
    age = f"last line {duration(frame.age)} ago"
    if frame.stands_still:
        return Text(f"{age}: the job hangs or has ended", style="bold red")
    return Text(age, style="dim")

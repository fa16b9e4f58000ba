"""gradlift find-scale: which static scale would fit a run, if any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._find_scale import FORMATS, Advice, Candidate, Shares
from .._find_scale import find_scale as find
from .._words import power

_ROWS = 16  # of scales: what fits a screen


@click.command("find-scale")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="All candidates as JSON.")
def find_scale(run: Path, as_json: bool) -> None:
    """Say which static scale would fit RUN (a journal or a run's folder), and why."""
    advice = find(run)
    if as_json:
        click.echo(json.dumps(_plain(advice), indent=1))
    else:
        _print(advice)


def _plain(advice: Advice) -> dict[str, object]:
    return {
        "verdict": advice.verdict,
        "scale": advice.scale,
        "reason": advice.reason,
        "zero": None if math.isnan(advice.zero) else advice.zero,
        "candidates": [
            {"scale": c.scale, "formats": {name: _numbers(s) for name, s in c.formats.items()}}
            for c in advice.candidates
        ],
    }


def _numbers(shares: Shares) -> dict[str, float | None]:
    return {name: None if math.isnan(x) else x for name, x in shares._asdict().items()}


def _print(advice: Advice) -> None:
    console = Console(highlight=False)
    if advice.candidates:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        table.add_column("scale", justify="right", no_wrap=True)
        for format in FORMATS:
            table.add_column(format.name, justify="right", no_wrap=True)
        table.add_column("steps", justify="right", no_wrap=True)
        for candidate in _thinned(advice):
            chosen = candidate.scale == advice.scale
            cells = [_cell(candidate.formats[f.name]) for f in FORMATS]
            steps = _percent(candidate.formats["FP16"].steps)
            style = "bold green" if chosen else ""
            table.add_row(power(candidate.scale), *cells, steps, style=style)
        console.print(table)
        console.print(
            "Per cent of the elements flushed/subnormal/overflowing; steps: per cent of the steps\n"
            "that would overflow in FP16.\n"
        )
    found = {
        "static": f"Use 2^{math.log2(advice.scale or 1):.0f}.",
        "none": "Use none.",
        "no single scale": "No single scale fits.",
        "unknown": "Cannot tell.",
    }
    console.print(Text(found[advice.verdict], "bold"))
    console.print(Text(advice.reason))


def _thinned(advice: Advice) -> list[Candidate]:
    """Every n-th scale, counted from the recommended one, so that it is among them."""
    every = math.ceil(len(advice.candidates) / _ROWS)
    scales = [c.scale for c in advice.candidates]
    start = scales.index(advice.scale) % every if advice.scale in scales else 0
    return list(advice.candidates[start::every])


def _cell(shares: Shares) -> str:
    return "/".join(_percent(x) for x in (shares.flushed, shares.subnormal, shares.overflowing))


def _percent(x: float) -> str:
    """
    >>> _percent(0.0), _percent(0.00001), _percent(0.123), _percent(1.0)
    ('0', '<.1', '12.3', '100')
    """
    if math.isnan(x):
        return "-"
    if x == 0 or x == 1:
        return f"{100 * x:.0f}"
    return f"{100 * x:.1f}" if x >= 0.001 else "<.1"

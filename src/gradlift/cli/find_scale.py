"""gradlift find-scale: which static scale would fit a run, if any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from ..analysis.static_scale import find_scale as find
from ..rules.static_choice import Advice, Effect


@click.command("find-scale")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="All candidates as JSON.")
def find_scale(run: Path, as_json: bool) -> None:
    """Recommend a static scale for RUN (a journal or a run's folder), with the reason."""
    advice = find(run)
    if as_json:
        click.echo(json.dumps(_plain(advice), indent=1))
    else:
        click.echo(str(advice))


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


def _numbers(effect: Effect) -> dict[str, float | None]:
    return {name: None if math.isnan(x) else x for name, x in effect._asdict().items()}

"""gradlift replay: what another rule would have done with a recorded run."""

from __future__ import annotations

import math
from pathlib import Path

import click
from rich.console import Console

from ..analysis import words
from ..analysis.replay import replay as under
from ..journal import Run, read_journal
from .compare import side_by_side


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rule", required=True, help="As text: auto, dynamic, megatron:hysteresis=4, ...")
@click.option(
    "--retries",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Retries of a batch.",
)
def replay(run: Path, rule: str, retries: int) -> None:
    """Replay RUN under another rule, and print it beside what happened."""
    recorded = read_journal(run)
    again = under(recorded, rule, retries=retries)
    # A replay computes the scale only; samples and times are those of the recording.
    scale_only = Run(header=again.header, steps=[s._replace(seconds=math.nan) for s in again.steps])
    console = Console()
    console.print(side_by_side([recorded, scale_only], ["what happened", "replay"]))
    console.print(_difference(recorded, again), markup=False, highlight=False)


def _difference(recorded: Run, again: Run) -> str:
    """The first step at which the two differ, and what a replay does not show."""
    parted = next(
        (
            new.step
            for old, new in zip(recorded.steps, again.steps, strict=True)
            if (old.scale, old.verdict) != (new.scale, new.verdict)
        ),
        None,
    )
    if parted is None:
        text = "The replay and what happened are the same at every step."
    else:
        text = f"They differ from step {parted:,} on."
    if again.undecided:
        text += (
            f" {words.count(again.undecided, 'step')} are undecided: the recording overflowed at "
            "a larger scale, or did not measure amax."
        )
    return (
        text + " Losses are those of the recording: a replay computes the scale, not the weights."
    )

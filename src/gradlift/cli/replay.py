"""gradlift replay: what another rule would have done with a recorded run."""

from __future__ import annotations

import math
from pathlib import Path

import click
from rich.console import Console

from .. import _words as words
from .._replay import replay as under
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
    help="Retries granted to a batch.",
)
def replay(run: Path, rule: str, retries: int) -> None:
    """Replay RUN under another rule, beside what happened."""
    recorded = read_journal(run)
    again = under(recorded, rule, retries=retries)
    # A replay says what becomes of the scale; samples and times are still those of the recording.
    scale_only = Run(header=again.header, steps=[s._replace(seconds=math.nan) for s in again.steps])
    console = Console()
    console.print(side_by_side([recorded, scale_only], ["what happened", "replay"]))
    console.print(_said(recorded, again), markup=False, highlight=False)


def _said(recorded: Run, again: Run) -> str:
    """Where the two part, and what a replay cannot know."""
    parted = next(
        (
            new.step
            for old, new in zip(recorded.steps, again.steps, strict=True)
            if (old.scale, old.verdict) != (new.scale, new.verdict)
        ),
        None,
    )
    if parted is None:
        said = "The replay and what happened are the same at every step."
    else:
        said = f"They part at step {parted:,}."
    if again.undecided:
        said += (
            f" {words.count(again.undecided, 'step')} cannot be told: the recording overflowed at "
            "a smaller scale, or took no amax."
        )
    return said + " Losses are those of the recording: a replay moves the scale, not the weights."

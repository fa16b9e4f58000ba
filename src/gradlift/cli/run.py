"""gradlift run: an unchanged script, with gradlift's scaler in it, recorded and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .._folder import rank
from ..journal import Journal
from ..rules import parse
from ._script_command import ScriptCommand, carry_out, options


@click.command(cls=ScriptCommand)
@click.option("--rule", help='Another rule than the script\'s: "auto", "megatron", ...')
@click.option(
    "--every", default=50, show_default=True, type=click.IntRange(min=1), help="Steps per sample."
)
@click.option(
    "--trace-nan", is_flag=True, help="After a NaN loss, run the batch again and name the module."
)
@click.option("--apex", is_flag=True, help="import apex finds gradlift's amp and fp16_utils.")
@options
def run(
    command: tuple[str, ...], rule: str | None, trace_nan: bool, apex: bool, **how: Any
) -> None:
    """Run a PyTorch script with gradlift's scaler in place of torch's, record it, report.

    \b
    gradlift run train.py --lr 3e-4
    gradlift run --rule auto -m package.train --epochs 3
    gradlift run --apex old_train.py --opt-level O2

    Without --rule, scales, skips and weights are those of the plain run, to the bit, as long as
    each loss is finite: after one that is not, torch lowers a scale that is not to blame.
    """
    if rule is not None:
        parse(rule)
    if apex:
        from ._apex import stand_in

        stand_in(how["quiet"])

    def watch(journal: Journal) -> Callable[[], None]:
        from ..torch._recording import record

        on_event = None
        if trace_nan:
            from ..torch._trace import Tracer

            on_event = Tracer(journal)
        every = how["every"] if rank() == 0 else None
        return record(journal, rule=rule, every=every, on_event=on_event)

    carry_out(command, watch, mode="run", **how)

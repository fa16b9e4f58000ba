"""gradlift profile: watches any script and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..journal import Journal
from ._script_command import ScriptCommand, carry_out, options


@click.command(cls=ScriptCommand)
@click.option(
    "--every", default=20, show_default=True, type=click.IntRange(min=1), help="Steps per look."
)
@options
def profile(command: tuple[str, ...], **how: Any) -> None:
    """Watch a PyTorch script, with or without a scaler, and say what 16 bits would do to it.

    \b
    gradlift profile train.py --lr 3e-4

    Nothing is changed: the script's numbers are those of the plain run, to the bit.
    """

    def watch(journal: Journal) -> Callable[[], None]:
        from ..torch._profile import profile

        return profile(journal, every=how["every"])

    carry_out(command, watch, mode="profile", **how)

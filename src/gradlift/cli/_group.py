"""The group of all commands, and how errors look."""

from __future__ import annotations

import sys
from typing import Any

import click

from .._version import __version__
from ..errors import GradliftError
from .demo import demo
from .formats import formats


class _OneLineErrors(click.Group):
    """gradlift's own errors are one clear line and exit status 2, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GradliftError as error:
            click.echo(f"gradlift: {error}", err=True)
            sys.exit(2)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradlift")
def gradlift() -> None:
    """Loss scaling for mixed-precision training: safe, fast and visible."""


gradlift.add_command(demo)
gradlift.add_command(formats)

"""The group of all commands; errors and warnings as one line each."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

import click

from .._version import __version__
from ..errors import GradliftError, JournalWarning
from ..text import visible

_COMMANDS = [
    "run",
    "report",
    "doctor",
    "explain",
    "watch",
    "compare",
    "replay",
    "find-scale",
    "selftest",
    "formats",
    "demo",
]


class _OneLineErrors(click.Group):
    """An error of gradlift is printed as one line without a traceback, and the exit status is 2. A
    warning about a journal is one line, too, and does not change the status. A command is imported
    when it is called, so that little is imported before a script under `gradlift run`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return _COMMANDS

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"gradlift.cli.{module}"), module)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        plain = warnings.showwarning

        def one_line(message: Any, category: Any, *where: Any) -> None:
            if issubclass(category, JournalWarning):
                click.echo(f"gradlift: {visible(str(message))}", err=True)
            else:
                plain(message, category, *where)

        warnings.showwarning = one_line  # type: ignore[assignment]
        try:
            return super().invoke(ctx)
        except GradliftError as error:
            click.echo(f"gradlift: {visible(str(error))}", err=True)
            sys.exit(2)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradlift")
def gradlift() -> None:
    """Loss scaling for mixed-precision training: safe, fast and visible."""

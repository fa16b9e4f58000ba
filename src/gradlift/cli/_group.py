"""The group of all commands, and how errors look."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import click

from .._version import __version__
from ..errors import GradliftError, JournalWarning
from .compare import compare
from .demo import demo
from .doctor import doctor
from .find_scale import find_scale
from .formats import formats
from .profile import profile
from .replay import replay
from .report import report
from .run import run
from .selftest import selftest
from .watch import watch


class _OneLineErrors(click.Group):
    """gradlift's own errors are one clear line and exit status 2, never a traceback; so are its
    warnings about a journal, and the status is the command's."""

    def invoke(self, ctx: click.Context) -> Any:
        plain = warnings.showwarning

        def one_line(message: Any, category: Any, *where: Any) -> None:
            if issubclass(category, JournalWarning):
                click.echo(f"gradlift: {message}", err=True)
            else:
                plain(message, category, *where)

        warnings.showwarning = one_line  # type: ignore[assignment]
        try:
            return super().invoke(ctx)
        except GradliftError as error:
            click.echo(f"gradlift: {error}", err=True)
            sys.exit(2)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradlift")
def gradlift() -> None:
    """Loss scaling for mixed-precision training: safe, fast and visible."""


_LOOKING = (report, doctor, watch, compare, replay, find_scale)
for command in (run, profile, *_LOOKING, selftest, formats, demo):
    gradlift.add_command(command)

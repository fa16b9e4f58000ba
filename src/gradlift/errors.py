"""The errors that gradlift raises: `except gradlift.GradliftError` catches all of them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from .text import visible


class GradliftError(Exception):
    """Base of every error that gradlift raises on purpose.

    >>> import gradlift
    >>> try:
    ...     gradlift.rules.parse("static:1000")
    ... except gradlift.GradliftError as error:
    ...     print(type(error).__name__)
    SettingsError
    """

    def __str__(self) -> str:
        """Names of parameters and values from files are in here: safe to print."""
        return visible(super().__str__(), keep="\n")


class SettingsError(GradliftError, ValueError):
    """A setting, or a text that names a rule, is invalid; the message has the reason."""


class SettingsTypeError(SettingsError, TypeError):
    """A setting has the wrong type, so it is a TypeError as well."""


class StateError(GradliftError, ValueError, RuntimeError):
    """A loaded state is damaged or belongs to another rule. Nothing was changed.

    PyTorch's scaler raises RuntimeError for some of these, other libraries ValueError: it is both.
    """


class JournalError(GradliftError, ValueError):
    """A file is not a journal, or was written by a later version of gradlift."""


class LogError(JournalError):
    """A file is neither a journal nor a log of a known format."""


class MisuseError(GradliftError, RuntimeError, ValueError):
    """Calls came in the wrong order, or were given what they cannot take; the message names what is
    missing. PyTorch's scaler raises RuntimeError for the first, ValueError for the second: it is
    both."""


class RankError(MisuseError):
    """Ranks could not agree on a step: they differ, or one of them ended or hangs."""


class TrainingHalted(GradliftError, RuntimeError):
    """A limit set by the user was reached, so training was stopped.

    >>> import gradlift
    >>> try:
    ...     raise TrainingHalted("3 steps in a row were skipped")
    ... except gradlift.GradliftError as why:
    ...     print(why)
    3 steps in a row were skipped
    """


class JournalWarning(UserWarning):
    """A journal could be read or written only in part."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the line of the user's code that called gradlift, or that called the framework.

    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     warn("the scale held")
    >>> str(seen[0].message)
    'the scale held'
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(visible(message, keep="\n"), category, stacklevel=level)


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an error of other code, whose type and text stay as they are; before Python
    3.11 the note is a warning.

    >>> try:
    ...     raise MemoryError("out of memory")
    ... except MemoryError as error:
    ...     add_note(error, "nothing was written")
    """
    text = visible(text, keep="\n")
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        warn(text)


_PASSED = {"gradlift", "torch", "jax", "keras", "tensorflow", "mxnet"}


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

"""One family of errors: `except gradlift.GradliftError` catches all that gradlift raises."""

from __future__ import annotations


class GradliftError(Exception):
    """Base of every error that gradlift raises on purpose.

    >>> import gradlift
    >>> try:
    ...     gradlift.rules.parse("static:1000")
    ... except gradlift.GradliftError as error:
    ...     print(type(error).__name__)
    SettingsError
    """


class SettingsError(GradliftError, ValueError):
    """A setting, or a text that names a rule, that cannot work; the message says why."""


class StateError(GradliftError, ValueError):
    """A loaded state that is damaged or belongs to another rule. Nothing was changed."""


class JournalError(GradliftError, ValueError):
    """A file that is not a journal, or one written by a later gradlift."""


class MisuseError(GradliftError, RuntimeError):
    """Calls in an order that cannot work; the message names the call that is missing."""


class RankError(MisuseError):
    """Ranks that must act together cannot: they differ, or one of them no longer answers."""


class TrainingHalted(GradliftError, RuntimeError):
    """A limit set by the user was reached: training was stopped before it wasted more steps."""


class JournalWarning(UserWarning):
    """A journal was readable only in part (cut off, empty, a damaged line)."""

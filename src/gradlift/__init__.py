"""gradlift: loss scaling for mixed-precision training.

The core knows no framework. Adapters are modules of their own: `gradlift.numpy`, and one for each
framework.
"""

from . import formats, rules
from ._version import __version__
from .analysis.diagnosis import diagnose
from .analysis.replay import replay
from .core import Cause, Limits, StepResult, Verdict
from .errors import GradliftError, TrainingHalted
from .journal import Journal, Run, Step, read_journal
from .reading import Reading

_LAZY = ("record", "Session")  # they look at every framework's runs, so they come when asked for

__all__ = [
    "formats",
    "rules",
    "Reading",
    "Verdict",
    "Cause",
    "StepResult",
    "Limits",
    "Journal",
    "read_journal",
    "Run",
    "Step",
    "replay",
    "diagnose",
    "record",
    "Session",
    "GradliftError",
    "TrainingHalted",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""gradlift: loss scaling for mixed-precision training.

The core knows no framework. Adapters are modules of their own: `gradlift.numpy`, and one for each
framework.
"""

from . import formats, rules
from ._diagnose import diagnose
from ._replay import replay
from ._version import __version__
from .errors import GradliftError
from .journal import Journal, read_journal
from .reading import Reading
from .verdict import Cause, StepResult, Verdict

__all__ = [
    "formats",
    "rules",
    "Reading",
    "Verdict",
    "Cause",
    "StepResult",
    "Journal",
    "read_journal",
    "replay",
    "diagnose",
    "GradliftError",
    "__version__",
]

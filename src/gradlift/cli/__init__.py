"""The command line: one file for each command."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """`gradlift` and `python -m gradlift`."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(
            f"gradlift's command line needs {' and '.join(missing)}: pip install 'gradlift[report]'"
        )
    from ._group import gradlift

    gradlift()

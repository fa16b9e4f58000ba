"""One fault, and where the sources are that it is put into."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """In src/gradlift/`file` the text `old` becomes `new`."""

    file: str
    old: str
    new: str
    broken: str
    """What no longer holds."""
    tests: str
    """Which of the suite's tests must find it."""

    def path(self, tree: Path = TREE) -> Path:
        return tree / "src" / "gradlift" / self.file

    @property
    def places(self) -> int:
        """How often `old` is there; 1 if the fault can be put in."""
        path = self.path()
        return path.read_text().count(self.old) if path.is_file() else 0

"""Draws docs/pictures/auto-*.svg from what benchmarks/controllers.py found.

python benchmarks/controllers.py && python docs/draw_auto.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from traces.draw import draw  # noqa: E402  # found by the line above

FOUND = ROOT / "build" / "controllers" / "controllers.json"


def main() -> None:
    if not FOUND.exists():
        sys.exit(f"{FOUND} is missing: run benchmarks/controllers.py first")
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for path in draw(json.loads(FOUND.read_text()), folder, "auto-"):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

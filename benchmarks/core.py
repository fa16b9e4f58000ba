"""Cost of the core: one `advance` on Python numbers, one journal line, reading a long journal.

python benchmarks/core.py [--lines 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradlift import Journal, Reading, read_journal, rules
from gradlift.journal import Step


def advance_cost(name: str, blocks: int = 30, steps: int = 2000) -> float:
    """Median microseconds of one `advance`, over blocks of steps with an overflow in 50."""
    rule = rules.parse(name)
    readings = [Reading(nonfinite=i % 50 == 0, amax=100.0) for i in range(steps)]
    costs = []
    for _ in range(blocks):
        state = rule.init()
        start = time.perf_counter()
        for reading in readings:
            state = rule.advance(state, reading)
        costs.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(costs)


def journal_cost(lines: int) -> tuple[float, float, float]:
    """Median microseconds to write a line, seconds to read all back, bytes a line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        times = []
        with Journal(path) as journal:
            for i in track(range(lines), "writing the journal", transient=True):
                step = Step(i, 65536.0, 65536.0, 1.5 + i, False, 0.25, 0.5 + i, 1e-3, seconds=0.125)
                start = time.perf_counter()
                journal.step(step)
                times.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert len(read_journal(path).steps) == lines
        return (
            statistics.median(times) * 1e6,
            time.perf_counter() - start,
            path.stat().st_size / lines,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    lines = parser.parse_args().lines
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("what", "measured", "goal"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for name in ("static:8", "dynamic", "megatron", "auto"):
        table.add_row(f"advance, {name}", f"{advance_cost(name):.1f} us", "5 us")
    write, read, size = journal_cost(lines)
    table.add_row("journal, write a line (median)", f"{write:.1f} us", "20 us")
    table.add_row(f"journal, read {lines:,} lines", f"{read:.1f} s", f"{lines / 1e5:.0f} s")
    table.add_row("journal, bytes a line", f"{size:.0f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()

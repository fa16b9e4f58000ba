"""The report of a very long run: how long it takes, and how large the page is.

python benchmarks/report.py [--steps 1000000] [--parameters 1000] [--samples 200]

The journal is made up: a scale that is found and lost again, a thousand layers, an overflow now and
then. Reading, diagnosis and drawing are timed apart, once each.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradlift import Cause, Journal, Verdict, diagnose, read_journal, report
from gradlift.journal import Step

GOALS = {"seconds": 30.0, "megabytes": 15.0}


def write(path: Path, steps: int, parameters: int, samples: int) -> None:
    chance = random.Random(0)
    names = [
        f"layers.{i // 4}.{('qkv', 'out', 'wide', 'narrow')[i % 4]}" for i in range(parameters)
    ]
    scale, clean = 2.0**16, 0
    with Journal(path) as journal:
        journal.describe(rule="dynamic", parameters=dict.fromkeys(names, 2**20))
        for i in track(range(steps), "writing a journal", transient=True):
            if i % max(1, steps // samples) == 0:
                journal.sample(i, {name: shares(chance, k) for k, name in enumerate(names)})
            bad = clean > 600 and chance.random() < 0.003
            clean = 0 if bad else clean + 1
            after = scale / 2 if bad else scale * 2 if clean % 1300 == 0 and clean else scale
            after = min(max(after, 2.0**10), 2.0**24)
            facts = {"loss": 3 + chance.random(), "lr": 3e-4, "seconds": 0.5}
            if bad:
                blamed = (chance.choice(names),)
                skip = {"verdict": Verdict.SKIP, "cause": Cause.OVERFLOW, "culprits": blamed}
                journal.step(Step(i, scale, after, nonfinite=True, **skip, **facts))
                detail = {"cause": "OVERFLOW", "scale": scale, "next_scale": after}
                journal.event("skip", i, **detail, culprits=[f"{blamed[0]} (inf)"])
            else:
                amax = min(65504.0, scale * chance.random() / 8)
                journal.step(Step(i, scale, after, amax=amax, norm=chance.random(), **facts))
            scale = after


def shares(chance: random.Random, k: int) -> dict[str, object]:
    middle = -12 + chance.randrange(6) - k // 200
    counts = {e: max(1, int(2.0 ** (18 - abs(e - middle)))) for e in range(middle - 12, middle + 8)}
    return {"elements": 2**20, "zero": 0.01, "subnormal": 0.1, "near_max": 0.0, "exponents": counts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write(path, **vars(args))
        start = time.perf_counter()
        run = read_journal(path)
        read = time.perf_counter()
        diagnose(run)
        diagnosed = time.perf_counter()
        page = report.html(run)  # diagnoses once more
        drawn = time.perf_counter()
    took = {"read": read - start, "diagnose": diagnosed - read}
    took["draw"] = (drawn - diagnosed) - took["diagnose"]
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{len(run.steps)} steps, {args.parameters} parameters"
    )
    for title in ("", "", "goal"):
        table.add_column(title, justify="right" if title else "left")
    for name, seconds in took.items():
        table.add_row(name, f"{seconds:.1f} s", "")
    table.add_row("in all", f"{sum(took.values()):.1f} s", f"{GOALS['seconds']:.0f} s")
    megabytes = len(page.encode()) / 1e6
    table.add_row("page", f"{megabytes:.1f} MB", f"{GOALS['megabytes']:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()

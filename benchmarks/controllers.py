"""Every rule on the same traces, in a closed loop: what it loses, recomputes, wastes and flushes.

    python benchmarks/controllers.py             # about two minutes on two cores
    python benchmarks/controllers.py --quick     # short traces, few rules: does it run?
    python benchmarks/controllers.py --tune      # a small grid of settings, on the tuning seeds

A batch overflows when the largest float16 gradient of its backward pass, times the scale, exceeds
65504. A rule sees the largest parameter gradient only (inf if the batch overflowed). `traces` says
how traces are made, and reads those that were recorded from real training. Contenders: every
preset, and `auto`, which computes an overflowing batch again (up to 8 times; the batch that
calibrated it too, if `Headroom.recompute` says so: that counts as a retry); `auto:cautious`
computes nothing again.

Settings were chosen on the tuning seeds (and on recordings of other runs, traces/tuning); what is
reported comes from seeds and runs that were not looked at before.

Writes build/controllers/: table.md, controllers.json, and pictures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import multiprocessing
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rivals import rule_of
from traces import KINDS, STEPS, TUNING, Series, Trace, made, recorded
from traces.closed_loop import MEAN, SPREAD, TOP, mean, run
from traces.draw import COLOURS, draw
from traces.goals import judge

from gradlift import rules

TUNING_SEEDS = [*range(1, 9), *range(100, 108)]
SEEDS = list(range(21, 29))
FOLDER = Path(__file__).parents[1] / "build" / "controllers"
POINTS = 1000  # of a curve in the JSON file
TITLES = ("contender", "lost", "retries /1,000", "near from step", "unused bits", "% flushed")
GRID = {
    "auto": {"margin_bits": (1, 2), "leak": (1024, 2048), "explore": (96, 192)},
    "auto:cautious": {"margin_bits": (2, 3), "hold_bits": (3, 4), "explore": (24, 40)},
}

Job = tuple[str, list[list[Trace]]]
Curves = dict[str, tuple[Trace, Series]]


def batches(traces: list[Trace]) -> list[list[Trace]]:
    """Traces of one length run side by side."""
    by_length: dict[int, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_length[len(trace.amax)].append(trace)
    return list(by_length.values())


def contend(job: Job) -> tuple[str, dict[str, dict[str, Any]], Curves]:
    """One contender on all traces: means of each kind, and the scales on the first hidden one."""
    name, together = job
    cautious = name.startswith("auto:cautious")
    outcomes, curves = defaultdict(list), {}
    steps: dict[str, int] = {}
    for traces in together:
        found, used = run(rule_of(name), traces, retry=not cautious and name.startswith("auto"))
        for i, (trace, outcome) in enumerate(zip(traces, found)):
            outcomes[trace.kind].append(outcome)
            steps[trace.kind] = len(trace.amax)
            hidden = trace.kind not in KINDS or trace.label.endswith("hidden")
            if hidden and trace.kind not in curves:
                curves[trace.kind] = (trace, used[:, i])
    rows = {kind: mean(o) for kind, o in outcomes.items()}
    for kind, row in rows.items():
        row["lost_in_1000"] = 1000 * row["lost"] / steps[kind]
    return name, rows, curves


def thinned(trace: Trace, scales: dict[str, Series]) -> dict[str, Any]:
    """Curves of at most POINTS points: the tightest limit of each stretch, the scale at its end."""
    stretch = -(-len(trace.amax) // POINTS)
    starts = np.arange(0, len(trace.amax), stretch)
    limit = np.minimum.reduceat(np.where(np.isfinite(trace.peak), TOP - trace.peak, TOP), starts)
    curves: dict[str, Any] = {"label": trace.label, "step": starts.tolist()}
    curves["limit"] = np.round(limit, 2).tolist()
    for name, used in scales.items():
        held = np.where(np.isfinite(used), used, -np.inf)  # a lost batch was applied at no scale
        at = np.maximum.reduceat(held, starts)
        curves[name] = [float(x) if np.isfinite(x) else None for x in at]
    return curves


def measure(names: list[str], traces: list[Trace]) -> tuple[dict[str, Any], dict[str, Curves]]:
    together = batches(traces)
    rows, curves = {}, {}
    context = multiprocessing.get_context("spawn")
    with Progress() as bar, ProcessPoolExecutor(2, context) as pool:
        task = bar.add_task("contenders", total=len(names))
        for name, row, curve in pool.map(contend, [(n, together) for n in names]):
            rows[name] = row
            curves[name] = curve
            bar.update(task, advance=1, description=name)
    return rows, curves


def cells(name: str, row: dict[str, Any], steps: int) -> list[str]:
    settled = "never" if row["settled"] > steps else f"{row['settled']:,}"
    return [
        name,
        f"{row['lost']:,.1f}",
        f"{row['retries']:.1f}",
        settled,
        f"{row['unused']:.1f}",
        f"{row['flushed']:.2f}",
    ]


def markdown(lines: list[list[str]]) -> str:
    head = ["| " + " | ".join(TITLES) + " |", "|---|" + "---:|" * (len(TITLES) - 1)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def verdict(goal: dict[str, Any]) -> list[str]:
    said = "held" if goal["held"] else "MISSED"
    return [goal["what"], goal["where"], f"{goal['limit']:.4g}", f"{goal['got']:.4g}", said]


def tell(data: dict[str, Any], lengths: dict[str, int], console: Console) -> str:
    """Prints all tables; returns them as Markdown."""
    seeds = f"tuned on seeds {data['tuning_seeds']}, reported on seeds {data['seeds']}"
    intro = (
        f"Means over traces ({seeds}; recorded: one run each, of another seed than the tuned). "
        f"Flushed: elements lie N({MEAN}, {SPREAD}) binades below amax, below 2^-25 they are 0. "
        "Near: within 4 bits of the largest scale that does not overflow; the latest of all seeds."
    )
    said = ["# Controllers", intro]
    console.print(intro)
    for kind in data["kinds"]:
        rows = sorted(data["rows"].items(), key=lambda item: item[1][kind]["flushed"])
        lines = [cells(name, row[kind], lengths[kind]) for name, row in rows]
        table = Table(*TITLES, title=kind, box=box.SIMPLE_HEAD, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for line in lines:
            table.add_row(*line, style="bold" if line[0].startswith("auto") else "")
        console.print(table)
        said += [f"## {kind}", markdown(lines)]
    table = Table("goal", "on", "limit", "got", "", "best peer", box=box.SIMPLE_HEAD)
    said += ["## Goals", "| goal | on | limit | got | |\n|---|---|---:|---:|---|"]
    for goal in data["goals"]:
        line = verdict(goal)
        table.add_row(*line, goal["note"], style="" if goal["held"] else "bold red")
        said[-1] += "\n| " + " | ".join(line) + " |"
    console.print(table)
    held = sum(g["held"] for g in data["goals"])
    console.print(f"{held} of {len(data['goals'])} goals held")
    return "\n\n".join(said) + "\n"


def tune(traces: list[Trace], console: Console) -> None:
    """A small grid around the shipped settings, on the tuning seeds."""
    names = []
    for name, grid in GRID.items():
        for values in itertools.product(*grid.values()):
            changed = ",".join(f"{k}={v}" for k, v in zip(grid, values))
            names.append(f"{name}{',' if ':' in name else ':'}{changed}")
    rows, _ = measure(names, traces)
    kinds = list(dict.fromkeys(t.kind for t in traces))
    table = Table("lost, retries, unused bits, % flushed", *kinds, box=box.SIMPLE_HEAD)
    for name, row in rows.items():
        keys = ("lost", "retries", "unused", "flushed")
        table.add_row(name, *("  ".join(f"{row[k][key]:.2f}" for key in keys) for k in kinds))
    console.print(f"tuning seeds {TUNING_SEEDS}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare rules on traces of gradients.")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="1,000 steps, one seed, few rules")
    parser.add_argument("--tune", action="store_true", help="a grid of settings, tuning seeds")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    console = Console()
    if options.tune:
        return tune(made(KINDS, TUNING_SEEDS) + recorded(TUNING), console)
    clash = sorted(set(options.seeds) & set(TUNING_SEEDS))
    if clash:
        parser.error(f"the settings were tuned on seeds {clash}: report on others")
    seeds = options.seeds[:1] if options.quick else options.seeds
    names = [*COLOURS, "popart"] if options.quick else [*rules.PRESETS, "popart"]
    traces = made(KINDS, seeds, 1000 if options.quick else None) + recorded()
    rows, curves = measure(names, traces)
    lengths = {t.kind: len(t.amax) for t in traces}
    kinds = list(dict.fromkeys(t.kind for t in traces))
    rows = {name: {kind: row[kind] for kind in kinds} for name, row in rows.items()}
    data = {
        "seeds": seeds,
        "tuning_seeds": TUNING_SEEDS,
        "steps": 1000 if options.quick else STEPS,
        "kinds": kinds,
        "rules": {name: str(rule_of(name)) for name in names},
        "rows": rows,
        "goals": judge(rows),
        "curves": {
            kind: thinned(curves["auto"][kind][0], {n: curves[n][kind][1] for n in COLOURS})
            for kind in kinds
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(tell(data, lengths, console))
    (options.out / "controllers.json").write_text(json.dumps(data, indent=1) + "\n")
    for path in (options.out / n for n in ("table.md", "controllers.json")):
        console.print(path)
    for path in draw(data, options.out):
        console.print(path)


if __name__ == "__main__":
    main()

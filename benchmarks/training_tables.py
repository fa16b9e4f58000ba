"""What `benchmarks/training.py` writes: tables, verdicts, a JSON file and pictures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table
from tasks import Task

if TYPE_CHECKING:
    from training import Outcome

NOISE = 2  # standard deviations
TEST = (
    f'"Within seed noise": the mean score is at most {NOISE} standard deviations of float32\'s '
    "own scores (over the seeds) above float32's mean."
)
COLUMNS = ("score", "within seed noise", "skipped", "retries", "last scale", "flushed")
COLOURS = {
    "float32": "#24292f",
    "none": "#8c959f",
    "static 1024": "#bf8700",
    "torch": "#cf222e",
    "popart": "#8250df",
    "auto": "#1f6feb",
    "auto + layerwise": "#1a7f37",
}


def summary(runs: list[Outcome], single: list[Outcome]) -> dict[str, Any]:
    """One contender on one task, over the seeds."""
    scores = [r.score for r in runs]
    made: dict[str, Any] = {
        "score": average(scores),
        "sd": deviation(scores),
        "dead": sum(not math.isfinite(s) for s in scores),
        "skipped": average(r.skipped for r in runs),
        "retries": average(r.retries for r in runs),
        "last_scale": sorted(r.scales[-1] for r in runs),
        "flushed": average(r.flushed for r in runs),
        "spread": average(r.spread for r in runs),
        "parts": {k: average(r.parts.get(k, math.inf) for r in runs) for k in single[0].parts},
        "lifts": {k: average(r.lifts[k] for r in runs) for k in runs[0].lifts},
    }
    limit = average(r.score for r in single) + NOISE * deviation([r.score for r in single])
    made["within"] = made["score"] <= limit if len(runs) > 1 else None
    return made


def average(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.fmean(known) if known else math.nan


def deviation(values: list[float]) -> float:
    finite = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if finite else 0.0


def cells(name: str, row: dict[str, Any]) -> list[str]:
    low, *_, high = [*row["last_scale"], row["last_scale"][-1]]
    score = f"{row['score']:.4f} ± {row['sd']:.4f}" if not row["dead"] else "not finite"
    if name == "float32":
        return [score, "", "", "", "", ""]
    return [
        score,
        "-" if row["within"] is None else "yes" if row["within"] else "**no**",
        f"{row['skipped']:.1f}",
        f"{row['retries']:.1f}",
        f"2^{low:g}" if low == high else f"2^{low:g} to 2^{high:g}",
        "-" if math.isnan(row["flushed"]) else f"{row['flushed']:.2%}",
    ]


def remarks(task: Task, rows: dict[str, dict[str, Any]], runs: dict[str, list[Outcome]]) -> str:
    """What the table does not show: the parts, and how float32's gradients look."""
    said = [f"Score: {task.score_is}, less is better."]
    norms = [r.norms for r in runs["float32"]]
    spikes = [math.log2(max(n) / statistics.median(n)) for n in norms if statistics.median(n)]
    if spikes:
        said.append(f"Largest gradient norm over its median: 2^{average(spikes):.1f}.")
    single = rows["float32"]
    if single["parts"]:
        said.append(f"Gradients of the parts are {single['spread']:.0f} binades apart.")
        for name, row in rows.items():
            left = ", ".join(f"{part} {x:.3f}" for part, x in row["parts"].items())
            lifts = ", ".join(f"2^{x:.0f}" for x in row["lifts"].values())
            said.append(f"- {name}: {left}" + (f" (lifts {lifts})" if lifts else ""))
    return "\n".join(said)


def draw(task: Task, runs: dict[str, list[Outcome]], file: Path) -> None:
    """The loss and the scale over the steps, means over the seeds.

    Of a task with parts, the parts' scores: the sum of their losses would show the largest only.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.0), layout="constrained")
    names = list(runs["float32"][0].parts)
    for i, (name, some) in enumerate(runs.items()):
        colour, width = COLOURS[name], 2.2 if name == "float32" else 1.2
        if names:
            heights = [average(r.parts.get(part, math.nan) for r in some) for part in names]
            places = [place + (i - len(runs) / 2) / (len(runs) + 2) for place in range(len(names))]
            left.bar(places, heights, 1 / (len(runs) + 2), color=colour, label=name, align="edge")
        else:
            left.plot(smooth(across(r.losses for r in some)), color=colour, lw=width, label=name)
        if name not in ("float32", "none"):
            right.plot(across(r.scales for r in some), color=colour, lw=width)
    if names:
        left.set_xticks(range(len(names)), names)
    else:
        left.set_xlabel("step")
    shown = "score of each part" if names else "training loss"
    left.set_title(f"{task.title}: {shown}", loc="left", fontsize=9)
    right.set_title("log2 of the scale", loc="left", fontsize=9)
    right.set_xlabel("step")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def across(series: Iterable[list[float]]) -> list[float]:
    """The mean over the seeds, up to where the shortest run ended."""
    return [statistics.fmean(values) for values in zip(*series)]


def smooth(values: list[float], width: int = 15) -> list[float]:
    return [average(values[max(0, i - width) : i + 1]) for i in range(len(values))]


def plain(value: Any) -> Any:
    """JSON has no inf and no NaN."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write(tasks: list[Task], outcomes: list[Outcome], folder: Path, console: Console) -> None:
    """Prints and writes all there is."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "gradlift"
    pages, record = [TEST], {}
    for task in tasks:
        runs: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.task == task.name:
                runs.setdefault(outcome.contender, []).append(outcome)
        rows = {name: summary(some, runs["float32"]) for name, some in runs.items()}
        steps, seeds = max(r.steps for r in runs["float32"]), len(runs["float32"])
        title = f"{task.title} ({task.name}), {steps} steps, {seeds} seeds"
        shown = Table("", *COLUMNS, title=title, box=box.SIMPLE_HEAD, title_justify="left")
        lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for name, row in rows.items():
            shown.add_row(name, *(cell.replace("**", "") for cell in cells(name, row)))
            lines.append(f"| {name} | {' | '.join(cells(name, row))} |")
        said = remarks(task, rows, runs)
        console.print(shown)
        console.print(said, highlight=False)
        pages += [f"## {title}", "\n".join(lines), said]
        draw(task, runs, folder / f"{task.name}.svg")
        record[task.name] = {
            "title": task.title,
            "score": task.score_is,
            "steps": steps,
            "contenders": rows,
            "runs": [asdict(r) for some in runs.values() for r in some],
        }
    console.print(TEST, highlight=False)
    (folder / "table.md").write_text("\n\n".join(pages) + "\n")
    text = json.dumps(plain({"test": TEST, "tasks": record}), allow_nan=False)
    (folder / "training.json").write_text(text + "\n")

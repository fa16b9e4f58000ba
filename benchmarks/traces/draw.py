"""Pictures of what `benchmarks/controllers.py` found, from its JSON alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {
    "torch": "#cf222e",
    "megatron": "#bf8700",
    "auto": "#1f6feb",
    "auto:cautious": "#1a7f37",
}
GREY = "#c9ced6"


def _scales(kind: str, curves: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
    steps = curves["step"]
    axes.plot(steps, curves["limit"], color=GREY, lw=0.7, label="overflow above this")
    for name, colour in COLOURS.items():
        width = 1.6 if name.startswith("auto") else 1.1
        axes.step(steps, curves[name], where="post", color=colour, lw=width, label=name)
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("log2 of the scale")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(curves["label"], loc="left", fontsize=9)
    figure.legend(ncols=5, frameon=False, loc="outside lower center", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _prices(kinds: list[str], rows: dict[str, Any], path: Path) -> None:
    """% flushed over batches lost in 1,000 steps: down and to the left is better."""
    columns = 4
    lines = math.ceil(len(kinds) / columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(10, 2.7 * lines), layout="constrained", squeeze=False
    )
    for axes, kind in zip(grid.flat, kinds):
        for name, row in rows.items():
            ours = name in COLOURS
            x, y = row[kind]["lost_in_1000"], row[kind]["flushed"]
            axes.plot(
                x,
                y,
                "o",
                color=COLOURS.get(name, GREY),
                ms=7 if ours else 4,
                zorder=3 if ours else 2,
                label=name if ours else "other peers",
            )
        axes.set_yscale("log")
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(-0.02, 1000)
        axes.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
        axes.set_title(kind, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    for axes in grid.flat[len(kinds) :]:
        axes.axis("off")
    figure.supxlabel("batches lost in 1,000 steps", fontsize=9)
    figure.supylabel("% of elements flushed to zero", fontsize=9)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    figure.legend(
        unique.values(),
        unique.keys(),
        ncols=5,
        frameon=False,
        loc="outside upper center",
        fontsize=8,
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(data: dict[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """One picture of the scales on each kind of trace, one of what flushing less costs."""
    plt.rcParams["svg.hashsalt"] = "gradlift"
    made = []
    for kind, curves in data["curves"].items():
        made.append(folder / f"{prefix}{kind.lower().replace(' ', '-')}.svg")
        _scales(kind, curves, made[-1])
    made.append(folder / f"{prefix}prices.svg")
    _prices(data["kinds"], data["rows"], made[-1])
    return made

"""The path of one step: the functions of gradlift it calls, in order, and its changes of file.

    python benchmarks/step_path.py               counts
    python benchmarks/step_path.py --show plain   the path, to be read from top to bottom

A call is a Python function of gradlift that is entered between `scale` and the end of `update`;
comprehensions count. A change of file is a call whose file is not the one of the call before it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradlift
from gradlift.torch import GradScaler, MasterWeights

ROOT = Path(gradlift.__file__).parent
WARM_UP = 3
GOALS = {"plain": (65, 30), "journal": (75, 35), "masters": (110, 45), "device": (90, 45)}


class Call(NamedTuple):
    """One function that was entered."""

    depth: int
    file: str
    name: str


def loop(kind: str) -> Callable[[], None]:
    """A function that makes one step of a small network, scaled, as a user's loop does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    journal = Path(tempfile.mkdtemp()) / "run.jsonl" if kind == "journal" else None
    scaler = GradScaler("cpu", init_scale=8.0, journal=journal)
    scaler._force_device_path = kind == "device"
    optimizer: Any
    if kind == "masters":
        optimizer = MasterWeights(torch.optim.AdamW, model.half().parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 8, dtype=next(model.parameters()).dtype)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def path(kind: str) -> list[Call]:
    """The calls of one step, after a few that are not counted."""
    step = loop(kind)
    for _ in range(WARM_UP):
        step()
    calls: list[Call] = []
    depth = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal depth
        file = Path(frame.f_code.co_filename)
        if ROOT not in file.parents:
            return
        if event == "call":
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            calls.append(Call(depth, str(file.relative_to(ROOT)), name))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def changes(calls: list[Call]) -> int:
    """How often the file changes along the path."""
    return sum(a.file != b.file for a, b in itertools.pairwise(calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--show", choices=list(GOALS), help="print this path")
    options = parser.parse_args()
    if options.show:
        for call in path(options.show):
            print(f"{'  ' * call.depth}{call.name}  [{call.file}]")
        return
    print(f"{'step':8} {'calls':>6} {'goal':>5} {'files':>6} {'goal':>5}")
    for kind, (most_calls, most_changes) in GOALS.items():
        calls = path(kind)
        print(f"{kind:8} {len(calls):6} {most_calls:5} {changes(calls):6} {most_changes:5}")


if __name__ == "__main__":
    main()

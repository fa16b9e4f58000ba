"""PyTorch on the CPU: what a scaler adds to an optimizer step, beside torch's own.

python benchmarks/torch_step.py [--sets abcd] [--rounds 15] [--json out.json]

All contenders of a set run interleaved in one process; figures are medians and ratios to
`torch.amp.GradScaler` (+ `clip_grad_norm_`). Sets: a 100 tensors / 25.5M elements; b 148 / 124M
(GPT-2 small); c 2000 x 1k; d 1 x 100M.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gradlift.torch import GradScaler
from gradlift.torch.scaler.finite_check import look

MAX_NORM = 1.0
SCALE = 2.0**10  # a real one: with 1 there would be nothing to take out


def shapes(name: str) -> list[tuple[int, ...]]:
    if name == "a":
        return [(505, 505)] * 100
    if name == "b":  # GPT-2 small: 12 blocks of 12 tensors, two embeddings, the last norm
        block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
        block += [(3072, 768), (3072,), (768, 3072), (768,)]
        return [*block * 12, (50257, 768), (1024, 768), (768,), (768,)]
    return [(1000,)] * 2000 if name == "c" else [(100_000_000,)]


class Contender:
    """Parameters, gradients and an optimizer of its own; `run` is what is timed."""

    def __init__(self, sizes: list[tuple[int, ...]], dtype: str, **scaler: object) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.zeros(s)) for s in sizes]
        if dtype == "bfloat16":
            self.params = [torch.nn.Parameter(p.detach().bfloat16()) for p in self.params]
        if dtype == "mixed":
            halves = (
                p.detach().bfloat16() if i % 2 else p.detach() for i, p in enumerate(self.params)
            )
            self.params = [torch.nn.Parameter(p) for p in halves]
        for p in self.params:
            p.grad = torch.randn_like(p) * SCALE
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-5, fused=True)
        self.scaler = scaler

    def true_norm(self) -> float:
        squares = (float((p.grad.double() / SCALE).square().sum()) for p in self.params)
        return math.sqrt(math.fsum(squares))


def torch_own(c: Contender, clip: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    norm = torch.zeros(())

    def run() -> None:
        nonlocal norm
        if clip:
            scaler.unscale_(c.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(c.params, MAX_NORM)
        scaler.step(c.optimizer)
        scaler.update()

    return run, lambda: float(norm)


def careful_user(c: Contender, clip: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    """A norm by hand, `grad_scale` and `found_inf` set by hand: the least that is right."""
    norm = 0.0

    def run() -> None:
        nonlocal norm
        grads = [p.grad for p in c.params]
        norm = float(torch.nn.utils.get_total_norm(grads)) / SCALE
        coefficient = min(1.0, MAX_NORM / (norm + 1e-6)) if clip else 1.0
        c.optimizer.grad_scale = torch.tensor(SCALE / coefficient)
        c.optimizer.found_inf = torch.tensor(0.0 if math.isfinite(norm) else 1.0)
        c.optimizer.step()
        del c.optimizer.grad_scale, c.optimizer.found_inf

    return run, lambda: norm


def ours(c: Contender, clip: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    scaler = GradScaler("cpu", **(c.scaler or {"init_scale": SCALE}))

    def run() -> None:
        scaler.get_scale()  # gradients scaled by hand
        scaler.step(c.optimizer, max_norm=MAX_NORM if clip else None)
        scaler.update()

    return run, lambda: scaler.result.grad_norm


def bare(c: Contender, clip: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    return c.optimizer.step, lambda: math.nan


AUTO = f"headroom:init_scale={SCALE},max_scale={SCALE},min_scale={SCALE}"
ROWS = {
    "no scaler": (bare, {}),
    "torch.amp.GradScaler": (torch_own, {}),
    "careful user": (careful_user, {}),
    "gradlift": (ours, {}),
    "gradlift auto": (ours, {"rule": AUTO}),
}
GOALS = {  # ratio to torch, with and without clipping
    "gradlift": {"a": (0.72, 1.0), "b": (0.63, 0.95), "c": (0.80, 1.03), "d": (0.63, 0.95)},
    "gradlift auto": {"a": (0.82, 1.1), "b": (0.73, 1.05), "c": (0.90, 1.13), "d": (0.73, 1.05)},
}


def measure(
    name: str, clip: bool, dtype: str, rounds: int, tick: Callable[[], None]
) -> dict[str, dict[str, float]]:
    sizes = shapes(name)
    timed, contenders = {}, {}
    for row, (make, settings) in ROWS.items():
        contenders[row] = c = Contender(sizes, dtype, **settings)
        timed[row] = make(c, clip)
    truth = next(iter(contenders.values())).true_norm()
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    error: dict[str, float] = {}
    fresh = [p.grad.clone() for p in contenders["gradlift"].params]
    for i in range(rounds + 2):
        for row, (run, norm) in timed.items():
            if i == 0:  # the first round sees the same gradients everywhere: compare the norms
                run()
                error[row] = norm() / truth - 1 if clip else math.nan
                continue
            for p, g in zip(contenders[row].params, fresh):
                p.grad.copy_(g)  # a step takes the scale out, and clips
            start = time.perf_counter()
            run()
            if i > 1:
                times[row].append(time.perf_counter() - start)
        tick()
    base = statistics.median(times["torch.amp.GradScaler"])
    return {
        row: {
            "ms": statistics.median(t) * 1e3,
            "ratio": statistics.median(t) / base,
            "norm_error": error[row],
        }
        for row, t in times.items()
    }


def inspect_alone(name: str, rounds: int) -> dict[str, float]:
    grads = [torch.randn(s) for s in shapes(name)]
    reads, looks = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        for g in grads:
            g.sum()
        reads.append(time.perf_counter() - start)
        start = time.perf_counter()
        look(grads, 1.0, amax=False)
        looks.append(time.perf_counter() - start)
    read, seen = statistics.median(reads) * 1e3, statistics.median(looks) * 1e3
    return {"one_read_ms": read, "inspect_ms": seen, "ratio": seen / read}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", default="abcd")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    cases = [(s, clip, "float32") for s in args.sets for clip in (True, False)]
    if "a" in args.sets:
        cases += [("a", True, "bfloat16"), ("a", True, "mixed")]
    found = []
    # Drawn between the rounds only: a bar that refreshes itself is a thread beside the measurement.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("measuring", total=len(cases) * (args.rounds + 2))

        def tick() -> None:
            progress.advance(bar)
            progress.refresh()

        for name, clip, dtype in cases:
            rows = measure(name, clip, dtype, args.rounds, tick)
            found.append({"set": name, "clip": clip, "dtype": dtype, "rows": rows})
    table = Table(box=box.SIMPLE_HEAD, title="CPU, fused AdamW; ratio to torch.amp.GradScaler")
    for title in ("set", "clip", "gradients", "contender", "ms", "ratio", "goal", "norm error"):
        table.add_column(title)
    for case in found:
        for row, r in case["rows"].items():
            goal = ""
            if case["dtype"] == "float32" and row in GOALS:
                goal = f"{GOALS[row][case['set']][0 if case['clip'] else 1]:.2f}"
            error = "" if math.isnan(r["norm_error"]) else f"{r['norm_error']:+.1e}"
            cells = case["set"], "1.0" if case["clip"] else "-", case["dtype"], row
            table.add_row(*cells, f"{r['ms']:.1f}", f"{r['ratio']:.2f}", goal, error)
        table.add_section()
    console.print(table)
    alone = {s: inspect_alone(s, args.rounds) for s in args.sets}
    table = Table(
        box=box.SIMPLE_HEAD, title="inspect alone, against one read (sum) of all gradients"
    )
    for title in ("set", "one read ms", "inspect ms", "ratio", "goal"):
        table.add_column(title)
    for s, r in alone.items():
        goal = "1.25" if s in "bd" else ""
        table.add_row(
            s, f"{r['one_read_ms']:.1f}", f"{r['inspect_ms']:.1f}", f"{r['ratio']:.2f}", goal
        )
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"steps": found, "inspect": alone}, indent=1))


if __name__ == "__main__":
    main()

"""Two ranks under DDP (gloo, CPU): what a scaler adds to an optimizer step, beside torch's own.

python benchmarks/torch_ranks.py [--sets ac] [--rounds 15] [--json out.json]

Starts both ranks by itself, one thread each. All contenders run interleaved on the same averaged
gradients with fused AdamW; figures are medians of rank 0, ratios are to `torch.amp.GradScaler`
(+ `clip_grad_norm_`). gradlift's collective is timed where it happens and taken out of its row; it
has a row of its own. Sets: a 100 tensors / 25.5M elements; c 2000 x 1k.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_NORM = 1.0
SCALE = 2.0**10  # a real one: with 1 there would be nothing to take out
SHAPES = {"a": [(505, 505)] * 100, "c": [(1000,)] * 2000}


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Both ranks as processes; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, __file__, "--sets", options.sets, "--told", str(told)]
        command += ["--rounds", str(options.rounds), "--init", str(Path(folder) / "init")]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=env) for r in range(2)]
        try:
            codes = [rank.wait(timeout=1200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"a rank failed: {codes}")
        return json.loads(told.read_text())


def measure(options: argparse.Namespace) -> None:
    """One rank's part."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gradlift.torch import GradScaler
    from gradlift.torch.ranks import agreement as _agree

    dist.init_process_group(
        "gloo", init_method=f"file://{options.init}", rank=options.rank, world_size=2
    )
    waited = [0.0]
    gather = _agree.gather

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        table = gather(*args)
        waited[0] += time.perf_counter() - began
        return table

    _agree.gather = timed

    class Weights(torch.nn.Module):
        def __init__(self, shapes: list[tuple[int, ...]]) -> None:
            super().__init__()
            self.each = torch.nn.ParameterList(torch.zeros(s) for s in shapes)

        def forward(self) -> torch.Tensor:
            torch.manual_seed(options.rank)
            return sum((p * torch.randn_like(p)).sum() for p in self.each)

    def contender(
        name: str, shapes: list[tuple[int, ...]], clip: bool
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What is timed, and what puts the gradients back before it."""
        model = DistributedDataParallel(Weights(shapes))
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
        ours = name.startswith("gradlift")
        settings: dict[str, Any] = {"init_scale": SCALE, "growth_interval": 10**9}
        if name == "gradlift auto":
            settings = {"rule": f"headroom:init_scale={SCALE},max_scale={SCALE},min_scale={SCALE}"}
        if ours and name != "gradlift, no group":
            settings["process_group"] = dist.group.WORLD
        kind = GradScaler if ours else torch.amp.GradScaler
        scaler: Any = kind("cpu", **settings)
        scaler.scale(model()).backward()
        averaged = [p.grad.clone() for p in params]

        def put_back() -> None:
            for p, g in zip(params, averaged):
                p.grad.copy_(g)

        def by_torch() -> None:
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()

        def by_gradlift() -> None:
            scaler.step(optimizer, max_norm=MAX_NORM if clip else None)
            scaler.update()

        if name == "no scaler":
            return optimizer.step, put_back
        return by_gradlift if ours else by_torch, put_back

    names = ["no scaler", "torch", "gradlift", "gradlift auto", "gradlift, no group"]
    found: dict[str, Any] = {}
    for name in options.sets:
        for clip in (True, False):
            run = {n: contender(n, SHAPES[name], clip) for n in names}
            times: dict[str, list[float]] = {n: [] for n in names}
            waits: list[float] = []
            for round_ in range(options.rounds + 2):
                for n, (step, put_back) in run.items():
                    put_back()
                    dist.barrier()
                    waited[0] = 0.0
                    began = time.perf_counter()
                    step()
                    taken = time.perf_counter() - began - waited[0]
                    if round_ >= 2:
                        times[n].append(taken)
                        if n == "gradlift":
                            waits.append(waited[0])
            key = f"{name}{', clipped' if clip else ''}"
            found[key] = {n: statistics.median(t) for n, t in times.items()}
            found[key]["collective in a step"] = statistics.median(waits)
    bare = []
    row = torch.zeros(12, dtype=torch.float64)
    table = torch.empty(2, 12, dtype=torch.float64)
    for _ in range(200):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather(list(table.unbind(0)), row)
        bare.append(time.perf_counter() - began)
    found["gather"] = statistics.median(bare)
    if options.rank == 0:
        Path(options.told).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="ms a step, rank 0 of 2 (ratio to torch)")
    table.add_column("")
    sets = [key for key in found if key != "gather"]
    for key in sets:
        table.add_column(key, justify="right")
    for name in found[sets[0]]:
        cells = []
        for key in sets:
            ms = found[key][name] * 1e3
            ratio = found[key][name] / found[key]["torch"]
            apart = name == "collective in a step"
            cells.append(f"{ms:.2f}" if apart else f"{ms:.2f} ({ratio:.2f})")
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(f"a gather of 12 numbers by itself: {found['gather'] * 1e6:.0f} microseconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sets", default="ac")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--init", help=argparse.SUPPRESS)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options)
        return
    found = start(options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

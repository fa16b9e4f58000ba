"""PyTorch on the CPU: what a step with float32 masters costs, what it weighs, how far it is off.

python benchmarks/torch_masters.py [--sets abc] [--rounds 15] [--json out.json]

Speed: AdamW with loss scaling and clipping, timed over backward + step + zero_grad, so that no cost
hides in backward. The backward pass hands out fresh gradients and does nothing else; its own time,
with zero_grad, is measured beside ("backward alone") and taken off. All contenders of a set run
interleaved in one process; figures are medians. Sets as in torch_step.py.

Weight: bytes per parameter of everything alive after some steps with gradients, counted in tensors.
Error: bfloat16 weights after 1,000 steps of AdamW against the same steps in float64.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimi
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch_step import MAX_NORM, shapes
from torchao.optim import _AdamW as TorchaoAdamW

from gradlift.torch import GradScaler, MasterWeights

LR = 1e-5
GOALS = {("a", "float16"): 0.65, ("b", "float16"): 0.65, ("c", "float16"): 0.15}
GOALS["c", "float32"] = 0.15


class Gradients(torch.autograd.Function):
    """A loss whose gradients are fresh copies of `source`."""

    @staticmethod
    def forward(ctx: Any, source: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.source = source
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.source, 1.0)


class Contender:
    def __init__(self, source: list[torch.Tensor]) -> None:
        self.source = source
        self.params = [torch.nn.Parameter(torch.zeros_like(g)) for g in source]

    def loss(self) -> torch.Tensor:
        return Gradients.apply(self.source, *self.params)

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


class Standard(Contender):
    """As it is done by hand: float32 copies, torch's scaler over them, copied back."""

    def __init__(self, source: list[torch.Tensor]) -> None:
        super().__init__(source)
        self.half = source[0].dtype is not torch.float32
        self.masters = self.params
        if self.half:
            self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.params]
            for m in self.masters:
                m.grad = torch.zeros_like(m)
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(()))

    def step(self) -> None:
        if self.half:
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.half:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)


class Ours(Contender):
    def __init__(self, source: list[torch.Tensor], **settings: Any) -> None:
        super().__init__(source)
        self.optimizer = MasterWeights(
            torch.optim.AdamW, self.params, lr=LR, fused=True, **settings
        )
        self.scaler = GradScaler("cpu", init_scale=1.0)

    def step(self) -> None:
        self.scaler.get_scale()  # gradients scaled by hand
        self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def speed(name: str, dtype: torch.dtype, rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(0)
    source = [torch.randn(s).to(dtype) for s in shapes(name)]
    rows = {"backward alone": Contender, "standard": Standard, "MasterWeights": Ours}
    contenders = {row: make(source) for row, make in rows.items()}
    times: dict[str, list[float]] = {row: [] for row in rows}
    for i in range(rounds + 2):
        for row, c in contenders.items():
            loss = c.loss()
            start = time.perf_counter()
            loss.backward()
            c.step()
            c.zero_grad()
            if i > 1:
                times[row].append(time.perf_counter() - start)
        tick()
    whole = {row: statistics.median(t) * 1e3 for row, t in times.items()}
    net = {row: ms - whole["backward alone"] for row, ms in whole.items()}
    return {
        row: {"ms": whole[row], "net": net[row], "ratio": net[row] / net["standard"]}
        for row in rows
    }


def settings() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """AdamW over bfloat16 weights, ours and others'; made from the parameters."""
    same = {"lr": 1e-3, "weight_decay": 0.0}

    def ours(update: str) -> Callable[..., torch.optim.Optimizer]:
        return lambda ps: MasterWeights(torch.optim.AdamW, ps, update=update, **same)

    return {
        "float32 weights": lambda ps: torch.optim.AdamW(ps, fused=True, **same),
        "bfloat16, torch.optim": lambda ps: torch.optim.AdamW(ps, **same),
        "MasterWeights": ours("masters"),
        'update="split"': ours("split"),
        'update="stochastic"': ours("stochastic"),
        "optimi, Kahan": lambda ps: optimi.AdamW(ps, kahan_sum=True, **same),
        "torchao, stochastic": lambda ps: TorchaoAdamW(ps, bf16_stochastic_round=True, **same),
    }


def weigh(row: str, tick: Callable[[], None], n: int = 2**24, steps: int = 1000) -> dict[str, Any]:
    """Bytes a parameter, and the error after `steps` small steps towards a target.

    The weights start near 1 and are to move by some 0.05 with noisy gradients, as in fine-tuning;
    the truth is torch.optim's AdamW over float64 weights, with the very same gradients.
    """
    dtype = torch.float32 if row == "float32 weights" else torch.bfloat16
    few = 2**15
    g = torch.Generator().manual_seed(0)
    start = (1 + 0.2 * torch.rand(n, generator=g)).to(torch.bfloat16)
    target = start.float() + 0.1 * torch.randn(n, generator=g).clamp(-2, 2)
    truth = torch.nn.Parameter(start[:few].double())
    reference = torch.optim.AdamW([truth], lr=1e-3, weight_decay=0.0)
    big, small = (torch.nn.Parameter(start[:k].to(dtype)) for k in (n, few))
    optimizer = settings()[row]([small])
    for _ in range(steps):
        noise = torch.randn(few, generator=g)
        gradient = (truth.detach().float() - target[:few] + 0.1 * noise).to(torch.bfloat16)
        small.grad, truth.grad = gradient.to(dtype), gradient.double()
        optimizer.step()
        reference.step()
        tick()
    off = (small.detach().double() - truth.detach()).abs() / truth.detach().abs()
    kept = [optimizer.masters[0]] if isinstance(optimizer, MasterWeights) else [small]
    inside = (kept[0].detach().double() - truth.detach()).abs() / truth.detach().abs()
    optimizer = settings()[row]([big])
    for _ in range(2):
        big.grad = torch.randn(n).to(dtype)
        optimizer.step()
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive(optimizer)}
    return {
        "bytes": sum(seen.values()) / n,
        "weight": float(off.mean()),
        "kept": float(inside.mean()),
    }


def alive(optimizer: Any) -> list[torch.Tensor]:
    """Every tensor that an optimizer can reach."""
    seen: set[int] = set()
    found, todo = [], [vars(optimizer)]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found.append(x)
            todo.append(x.grad)
        elif isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, (list, tuple)):
            todo += x
        elif type(x).__module__.startswith(("gradlift", "torch.optim")):
            todo += [vars(x)] if hasattr(x, "__dict__") else []
            todo += [getattr(x, name) for name in getattr(type(x), "__slots__", ())]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", default="abc")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    cases = [(s, d) for s in args.sets for d in (torch.float16, torch.float32)]
    found: dict[str, Any] = {}
    weighed: dict[str, Any] = {}
    steps = 1000
    # Drawn between the rounds only: a bar that refreshes itself is a thread beside the measurement.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(
            "measuring", total=len(cases) * (args.rounds + 2) + len(settings()) * steps / 100
        )

        def tick(by: float = 1.0) -> None:
            progress.advance(bar, by)
            progress.refresh()

        for name, dtype in cases:
            found[f"{name} {dtype}".replace("torch.", "")] = speed(name, dtype, args.rounds, tick)
        for row in settings():
            weighed[row] = weigh(row, lambda: tick(0.01), steps=steps)
    table = Table(box=box.SIMPLE_HEAD, title="backward + step + zero_grad, CPU, fused AdamW, clip")
    for title in ("set", "parameters", "contender", "ms", "without backward", "ratio", "goal"):
        table.add_column(title)
    for case, rows in found.items():
        name, dtype = case.split()
        for row, r in rows.items():
            goal = GOALS.get((name, dtype)) if row == "MasterWeights" else None
            cells = f"{r['ms']:.1f}", f"{r['net']:.1f}", f"{r['ratio']:.2f}"
            table.add_row(name, dtype, row, *cells, f"{goal:.2f}" if goal else "")
        table.add_section()
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, title=f"AdamW, bfloat16 weights, after {steps} steps")
    for title in ("", "bytes a parameter", "mean error of the weight", "of what is kept"):
        table.add_column(title)
    for row, r in weighed.items():
        table.add_row(row, f"{r['bytes']:.1f}", f"{r['weight']:.1e}", f"{r['kept']:.1e}")
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"speed": found, "weight": weighed}, indent=1))


if __name__ == "__main__":
    main()

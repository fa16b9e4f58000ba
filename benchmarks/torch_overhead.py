"""PyTorch on the CPU: a scaler's own time in a real training step, and how it grows.

python benchmarks/torch_overhead.py [--steps 20]

The scaler's own time (scale, inspect, clip, advance, journal line) is measured on the gradients of
the example's GPT with a fused optimizer whose step does nothing, and divided by the median time of
the whole float16 step (forward, backward, clip, AdamW). A probe's time is what its hooks take. What
`gradlift run` adds is the mean over whole sampling intervals. Then the scaler's time over more
tensors, more elements and more steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gradlift
from gradlift import Journal, Reading
from gradlift.rules import parse
from gradlift.torch import GradScaler
from gradlift.torch.probing import ModuleProbe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import torch_gpt

torch_gpt.WIDTH = 256  # 3.2M parameters
NEVER = 1e9
RUN_EVERY = 50  # the command's default
PROBE_EVERY = 100  # the default of probe()


class Idle(torch.optim.SGD):
    """A fused optimizer that does nothing: what is left is the scaler's own time.

    Scale 1 and a norm that never clips leave the gradients as they are, for every contender.
    """

    _step_supports_amp_scaling = True

    def step(self, closure: None = None) -> None:
        return None


def median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for i in range(rounds + 3):
        start = time.perf_counter()
        work()
        if i >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def whole_step(model: torch.nn.Module, text: torch.Tensor, rounds: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = GradScaler("cpu")

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(*torch_gpt.sample_batch(text))

    return median_ms(lambda: scaler.train_step(forward, optimizer, max_norm=1.0), rounds)


def own_time(
    params: list[torch.nn.Parameter], rounds: int, make: Callable[[], torch.amp.GradScaler]
) -> float:
    optimizer, scaler = Idle(params, lr=1e-4), make()
    loss = torch.tensor(1.0)

    def work() -> None:
        scaler.scale(loss)
        if isinstance(scaler, GradScaler):
            scaler.step(optimizer, max_norm=NEVER)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, NEVER)
            scaler.step(optimizer)
        scaler.update()

    return median_ms(work, rounds)


def recording(model: torch.nn.Module, folder: Path) -> dict[str, tuple[float, str]]:
    """Milliseconds a step that `gradlift run` adds, over whole sampling intervals, past the first
    steps, which are all looked at. The scale is 1, so that gradients stay as they are."""
    params = list(model.parameters())
    loss = torch.tensor(1.0, requires_grad=True)

    def torchs(scaler: torch.amp.GradScaler, optimizer: Idle) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    def ours(scaler: GradScaler, optimizer: Idle) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def bare(scaler: None, optimizer: Idle) -> None:
        loss.backward()
        optimizer.step()

    def mean_ms(work: Callable[..., None], scaler: Any) -> float:
        optimizer = Idle(params, lr=1e-4)
        for i in range(5 * RUN_EVERY):
            if i == RUN_EVERY:
                start = time.perf_counter()
            work(scaler, optimizer)
        return (time.perf_counter() - start) / (4 * RUN_EVERY) * 1e3

    added = {}
    for name, work, make in (
        ("torch's scaler", torchs, lambda: torch.amp.GradScaler("cpu", init_scale=1.0)),
        ("gradlift's scaler", ours, lambda: GradScaler("cpu", init_scale=1.0)),
        ("no scaler", bare, lambda: None),
    ):
        plain = mean_ms(work, make())
        with gradlift.record(folder / f"{name}.jsonl", every=RUN_EVERY):
            recorded = mean_ms(work, make())
        added[f"gradlift run adds, {name}"] = (recorded - plain, "0.1 %")
    return added


class Timed(ModuleProbe):
    """A probe that knows how long it took."""

    spent = 0.0

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        done = work(*args)
        self.spent += time.perf_counter() - start
        return done

    def _before(self, module: Any, args: Any) -> None:
        self._timed(super()._before, module, args)

    def _after(self, name: str, *, leaf: bool) -> Any:
        hook = super()._after(name, leaf=leaf)
        return lambda *args: self._timed(hook, *args)

    def _look(self, name: str, g: Any) -> None:
        self._timed(super()._look, name, g)

    def peak(self) -> Any:
        return self._timed(super().peak)

    def ended(self, reading: Any, scale: Any) -> None:
        self._timed(super().ended, reading, scale)


def auto_and_probe(model: torch.nn.Module, text: torch.Tensor, rounds: int) -> float:
    """Milliseconds a step of the rule "auto" and of probing one step in 100, by themselves."""
    probe = Timed(model, every=PROBE_EVERY)
    optimizer = Idle(model.parameters(), lr=1e-4)
    scaler = GradScaler("cpu", rule="auto")

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(*torch_gpt.sample_batch(text))

    looked, passed = [], []
    for i in range(2 * rounds):
        probe.again = i % 2 == 0
        probe.spent, probe.calls = 0.0, 1
        scaler.train_step(forward, optimizer)
        (passed if i % 2 else looked).append(probe.spent)
    probe.remove()
    probing = statistics.median(looked) + (PROBE_EVERY - 1) * statistics.median(passed)
    rule, reading = parse("auto:cautious"), Reading(False, 100.0, probe_amax=200.0)
    state = rule.init()
    return probing / PROBE_EVERY * 1e3 + median_ms(lambda: rule.advance(state, reading), 1000)


def filled(tensors: int, size: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(size)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    console = Console()
    torch.manual_seed(0)
    text, _, vocabulary = torch_gpt.load_text()
    model = torch_gpt.GPT(vocabulary)
    params = list(model.parameters())
    step = whole_step(model, text, steps)
    model(*torch_gpt.sample_batch(text)).backward()
    table = Table(box=box.SIMPLE_HEAD, title=f"CPU; one float16 step of a 3.2M GPT: {step:.0f} ms")
    for title in ("scaler with clipping", "own time ms", "share of a step", "goal"):
        table.add_column(title, justify="left" if title.startswith("scaler") else "right")
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "run.jsonl")
        makes = {
            "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=1.0),
            "gradlift": lambda: GradScaler("cpu", init_scale=1.0),
            "gradlift auto": lambda: GradScaler("cpu", rule="auto:init_scale=1,max_scale=1"),
            "gradlift, recorded": lambda: GradScaler(
                "cpu", init_scale=1.0, journal=journal, names=model
            ),
        }
        for name, make in makes.items():
            own = own_time(params, 10 * steps, make)
            goal = "" if name.startswith("torch") else "0.5 %"
            table.add_row(name, f"{own:.2f}", f"{own / step:.2%}", goal)
        own = auto_and_probe(model, text, max(3, steps // 2))
        table.add_row(
            f'"auto" and probe(every={PROBE_EVERY})', f"{own:.2f}", f"{own / step:.2%}", "0.3 %"
        )
        for name, (own, goal) in recording(model, Path(folder)).items():
            table.add_row(name, f"{own:.2f}", f"{own / step:.2%}", goal)
    console.print(table)

    table = Table(box=box.SIMPLE_HEAD, title="gradlift's own time, ms")
    for title in ("what grows", "", "", "", ""):
        table.add_column(title)

    def grown(cases: list[tuple[int, int]]) -> list[str]:
        times = [own_time(filled(*case), 2 * steps, lambda: GradScaler("cpu")) for case in cases]
        return [f"{ms:.2f}" for ms in times]

    counts = (250, 500, 1000, 2000)
    table.add_row("tensors of 1k", *map(str, counts))
    table.add_row("", *grown([(n, 1000) for n in counts]))
    sizes = (4, 8, 16, 32)
    table.add_row("elements in 10 tensors", *(f"{n}M" for n in sizes))
    table.add_row("", *grown([(10, n * 100_000) for n in sizes]))
    many, scaler = filled(50, 1000), GradScaler("cpu")
    optimizer, after = Idle(many, lr=1e-4), []
    for upto in (100, 1000, 4000, 16000):
        while scaler._scales[None].steps < upto - 100:
            scaler.get_scale()  # gradients scaled by hand
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

        def work() -> None:
            scaler.get_scale()  # gradients scaled by hand
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

        after.append(f"{median_ms(work, 97):.3f}")
    table.add_row("steps so far (50 tensors of 1k)", "100", "1000", "4000", "16000")
    table.add_row("", *after)
    console.print(table)


if __name__ == "__main__":
    main()

"""Real training in float16 on the CPU, by seven ways of scaling, float32 beside them.

    python benchmarks/training.py                       # everything, about a quarter of an hour
    python benchmarks/training.py --only heads policy   # some tasks
    python benchmarks/training.py --quick               # a few steps of each: does it run?

Each contender starts from the weights and sees the batches that float32 has (in `policy`, where
batches are the network's own answers, the prompts). The score is taken on data that is always the
same. A few times a run each gradient element that is not zero in float32, at the same weights and
on the same batch, is looked up in the float16 gradients: `flushed` is the share that is zero there.

Writes build/training/: table.md, training.json, and a picture of each task.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers; the networks are small

import argparse
import copy
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rivals import rule_of
from tasks import Task, all_tasks
from torch import Tensor, nn

from gradlift.torch import GradScaler, layerwise

LOOKS = 10  # at the flushed elements, in a run
RETRIES = 6
WORKERS = 2


@dataclass(frozen=True)
class Contender:
    """A way to train: `rule` is gradlift's, or "none" or "torch" for what is not gradlift's."""

    name: str
    rule: str
    half: bool = True
    retries: int = 0
    layerwise: bool = False


CONTENDERS = {
    c.name: c
    for c in (
        Contender("float32", "none", half=False),
        Contender("none", "none"),
        Contender("static 1024", "static:1024"),
        Contender("torch", "torch"),
        Contender("popart", "popart"),
        Contender("auto", "auto", retries=RETRIES),
        Contender("auto + layerwise", "auto", retries=RETRIES, layerwise=True),
    )
}


@dataclass
class Outcome:
    """What came of one run."""

    task: str
    contender: str
    seed: int
    score: float = math.inf
    parts: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    retries: int = 0
    flushed: float = math.nan
    spread: float = math.nan  # binades between the gradients of the parts, in float32
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # float32 only
    scales: list[float] = field(default_factory=list)  # log2
    lifts: dict[str, float] = field(default_factory=dict)  # log2
    seconds: float = 0.0


class Plain:
    """No scaler: float32, or float16 as it comes."""

    scale = 1.0

    def __init__(self, task: Task, model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        self.task, self.model, self.optimizer, self.outcome = task, model, optimizer, outcome

    def step(self, closure: Callable[[], Tensor]) -> bool:
        self.optimizer.zero_grad()
        closure().backward()
        self.outcome.norms.append(self.clip())
        self.optimizer.step()
        return True

    def clip(self) -> float:
        most = self.task.max_norm or math.inf
        return nn.utils.clip_grad_norm_(self.model.parameters(), most).item()


class Torch(Plain):
    """PyTorch's own scaler, in PyTorch's own loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scaler = torch.amp.GradScaler("cpu")

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.scaler.get_scale()

    def step(self, closure: Callable[[], Tensor]) -> bool:
        self.optimizer.zero_grad()
        before = self.scale
        self.scaler.scale(closure()).backward()
        if self.task.max_norm:
            self.scaler.unscale_(self.optimizer)
            self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scale < before  # its only sign
        self.outcome.skipped += skipped
        return not skipped


class Lifted(Plain):
    """gradlift: a rule, perhaps retries, perhaps lifts."""

    def __init__(self, contender: Contender, *args: Any) -> None:
        super().__init__(*args)
        self.retries = contender.retries
        self.scaler = GradScaler("cpu", rule=rule_of(contender.rule))
        self.lifted = None
        if contender.layerwise:
            self.lifted = layerwise(self.model, self.task.blocks, rule="auto", every=20)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.scaler.get_scale()

    def step(self, closure: Callable[[], Tensor]) -> bool:
        result = self.scaler.train_step(
            closure,
            self.optimizer,
            max_norm=self.task.max_norm,
            retries=self.retries,
            model=self.model,
        )
        self.outcome.skipped += not result.stepped
        self.outcome.retries += result.retries
        return result.stepped


def train(task: Task, contender: Contender, seed: int, steps: int) -> Outcome:
    """One run, from its seed to its score."""
    torch.manual_seed(seed)
    outcome, began = Outcome(task.name, contender.name, seed), time.perf_counter()
    model = task.model()
    twin = copy.deepcopy(model)  # for float32's gradients: knows of no lifts
    parts = (task, model, task.optimizer(model), outcome)
    by_rule = {"none": Plain, "torch": Torch}.get(contender.rule)
    stepper = by_rule(*parts) if by_rule else Lifted(contender, *parts)
    shares, spreads = [], []
    every = max(1, steps // LOOKS)
    for step in range(steps):
        with half(contender):
            batch = task.batch(model, step)

        def closure(step: int = step, batch: Any = batch) -> Tensor:
            with half(contender):
                loss = task.loss(model, batch)
            outcome.losses[step:] = [loss.item()]  # a retry writes over it
            return loss

        looking = step % every == every - 1
        if looking:
            twin.load_state_dict(model.state_dict())
            single_gradients(task, twin, batch)
            peaks = task.peaks(twin).values()
            spreads.append(max(peaks) - min(peaks) if peaks else math.nan)
        outcome.scales.append(math.log2(stepper.scale))
        stepped = stepper.step(closure)
        if looking and stepped:
            shares.append(flushed(model, twin))
        if not math.isfinite(outcome.losses[-1]) and not all_finite(model):
            break  # weights that are not finite stay so
    outcome.steps = len(outcome.losses)
    if all_finite(model):
        outcome.score, outcome.parts = task.score(model), task.parts(model)
    outcome.scales.append(math.log2(stepper.scale))
    outcome.flushed = mean(shares)
    outcome.spread = mean(spreads)
    if isinstance(stepper, Lifted) and stepper.lifted:
        outcome.lifts = {name: math.log2(x) for name, x in stepper.lifted.lifts.items()}
    outcome.seconds = time.perf_counter() - began
    return outcome


def half(contender: Contender) -> torch.autocast:
    return torch.autocast("cpu", torch.float16, enabled=contender.half)


def single_gradients(task: Task, twin: nn.Module, batch: Any) -> None:
    """float32's gradients on this batch; the random numbers are those that the step will see."""
    kept = torch.get_rng_state()
    twin.zero_grad()
    task.loss(twin, batch).backward()
    torch.set_rng_state(kept)


def flushed(model: nn.Module, twin: nn.Module) -> float:
    """Of the elements that are not zero in the twin's gradients, the share that is in the model's.

    Unscaled and clipped or not: neither makes a zero here, nor takes one away.
    """
    alive = gone = 0
    for mine, its in zip(model.parameters(), twin.parameters()):
        if its.grad is not None:
            there = its.grad != 0
            alive += int(there.sum())
            gone += int((there & (mine.grad == 0)).sum()) if mine.grad is not None else 0
    return gone / alive if alive else math.nan


def all_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


@cache
def _tasks() -> dict[str, Task]:
    return all_tasks()


def job(task: str, contender: str, seed: int, steps: int | None) -> Outcome:
    torch.set_num_threads(1)
    chosen = _tasks()[task]
    return train(chosen, CONTENDERS[contender], seed, steps or chosen.steps)


def run(names: list[str], seeds: int, steps: int | None, console: Console) -> list[Outcome]:
    """Every contender on every task, `seeds` times; order is that of the tables."""
    jobs = [(t, c, seed, steps) for t in names for seed in range(seeds) for c in CONTENDERS]
    spawn = multiprocessing.get_context("spawn")
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with (
        Progress(*columns, console=console) as bar,
        ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool,
    ):
        task = bar.add_task("runs", total=len(jobs))
        futures = [pool.submit(job, *each) for each in jobs]
        try:
            for future in as_completed(futures):
                done = future.result()
                bar.update(task, advance=1, description=f"{done.task}, {done.contender}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def main() -> None:
    from training_tables import write

    tasks = _tasks()
    parser = argparse.ArgumentParser(description="Train in float16 by seven ways of scaling.")
    parser.add_argument("--only", nargs="+", choices=list(tasks), default=list(tasks))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=Path, default=Path("build/training"))
    options = parser.parse_args()
    console = Console()
    seeds, steps = (1, 6) if options.quick else (options.seeds, None)
    began = time.perf_counter()
    outcomes = run(options.only, seeds, steps, console)
    write([tasks[name] for name in options.only], outcomes, options.out, console)
    console.print(f"{time.perf_counter() - began:.0f} s; written to {options.out}/")


if __name__ == "__main__":
    main()

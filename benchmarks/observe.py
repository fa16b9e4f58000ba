"""PyTorch on the CPU: what `gradlift run` and `gradlift.record` add to a training step.

python benchmarks/observe.py [--rounds 3]

A plain process and recorded ones take turns: each makes a step (of a small model: a sampling period
of steps), then the next. What is compared is the process' own time. "gradients and scales" leaves
out the forward pass, the weights and the search for the first bad step. Of the steps that are
looked at in the same way the median difference to the plain steps is taken, and the cost is their
mean over one sampling period; the first 250 steps, in which more is looked at, have a column of
their own. "nothing" is a second plain process: its figure should be 0, and shows what noise is.
Each round has new processes; shown are the median of the rounds, the least and the greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVERY = 50  # the command's default
OFTEN = 250  # steps in which the forward pass and the weights are looked at more often
PERIOD = 100  # steps after which looks repeat, later
MODES = {"plain": "", "again": "nothing", "grads": "gradients and scales", "all": "everything"}
TASKS = {  # model, autocast or scaler; steps a turn; periods; goals in percent or microseconds
    "gpt float16": (1, 1, {"grads": "0.1 %", "all": "1 %"}),  # as the example is run
    "gpt float32": (1, 3, {"grads": "0.1 %", "all": "1 %"}),
    "gpt bfloat16": (1, 3, {"grads": "0.1 %", "all": "1 %"}),
    "mlp torch's scaler": (EVERY, 20, {"all": "30 us"}),
    "mlp gradlift's scaler": (EVERY, 20, {"all": "30 us"}),
    "mlp no scaler": (EVERY, 20, {"all": "30 us"}),
}


# One process


def gpt(dtype: str) -> Callable[[], None]:
    """A step of the example's GPT, as the example makes it."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torch_gpt

    text, _, vocabulary = torch_gpt.load_text()
    model = torch_gpt.GPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = torch_gpt.warmup_cosine(optimizer, 10**6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step() -> None:
        inputs, targets = torch_gpt.sample_batch(text)
        optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            loss = model(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch_gpt.MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    return step


def mlp(scaler_of: str) -> Callable[[], None]:
    """A step of a net so small that the calls of Python are all it costs."""
    import torch

    import gradlift.torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
    kinds = {"torch's scaler": torch.amp.GradScaler, "gradlift's scaler": gradlift.torch.GradScaler}
    scaler: Any = kinds[scaler_of]("cpu", 2.0**10) if scaler_of in kinds else None

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if scaler is None:
            loss.backward()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def work(task: str, mode: str, folder: str) -> None:
    """Reads numbers of steps, and answers each with the seconds of these steps."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _, variant = task.partition(" ")
    with contextlib.ExitStack() as around:
        if mode in ("grads", "all"):
            import gradlift

            path = Path(folder) / f"{mode}.jsonl"
            session = around.enter_context(gradlift.record(path, every=EVERY, rerun=mode == "all"))
            if mode == "grads":
                session._hooks.sampling.every = 0
        step = gpt(variant) if model == "gpt" else mlp(variant)
        for line in sys.stdin:
            times = [time.process_time()]
            for _ in range(int(line)):
                step()
                times.append(time.process_time())
            print(json.dumps([b - a for a, b in itertools.pairwise(times)]), flush=True)


# All of them


class Worker:
    """A process that makes steps when it is asked to."""

    def __init__(self, task: str, mode: str, folder: str) -> None:
        words = [sys.executable, __file__, "--worker", task, mode, folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=env, **pipes)  # type: ignore[call-overload]
        self.times: list[float] = []

    def make(self, steps: int) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.times += json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate()


def kind_of(step: int) -> int:
    """Steps of the same kind are looked at in the same way: a divisor of the sampling period."""
    return next(n for n in (PERIOD, EVERY, EVERY // 5, 1) if step % n == 0)


def cost(plain: list[float], other: list[float]) -> tuple[float, float]:
    """Seconds a step that the other process adds: past the first steps, and within them."""
    added = defaultdict(list)
    for i in range(OFTEN, len(plain)):
        added[kind_of(i)].append(other[i] - plain[i])
    in_period = [kind_of(i) for i in range(PERIOD)]
    later = sum(statistics.median(added[kind]) for kind in in_period) / PERIOD
    first = statistics.mean(b - a for a, b in zip(plain[1:OFTEN], other[1:OFTEN]))
    return later, first  # the very first step loads code


def one_round(task: str) -> tuple[float, dict[str, tuple[float, float]]]:
    """Median seconds of a plain step, and what each mode adds."""
    turn, periods, _ = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        workers = {mode: Worker(task, mode, folder) for mode in MODES}
        order = list(workers.values())
        for _ in range((OFTEN + periods * PERIOD) // turn):
            for worker in order:
                worker.make(turn)
            order.append(order.pop(0))  # none is always the first
        for worker in order:
            worker.end()
    plain = workers["plain"].times
    added = {mode: cost(plain, workers[mode].times) for mode in MODES if mode != "plain"}
    return statistics.median(plain), added


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose name has this in it")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    print(f"{'step':22} {'plain ms':>9}  {'recorded':21} {'adds us (least, greatest)':>27}", end="")
    print(f" {'share':>7} {'goal':>6} {'first steps us':>16}")
    for task in (name for name in TASKS if options.only in name):
        rounds = [one_round(task) for _ in range(options.rounds)]
        plain = statistics.median(seconds for seconds, _ in rounds)
        for mode, name in list(MODES.items())[1:]:
            later = sorted(added[mode][0] * 1e6 for _, added in rounds)
            first = statistics.median(added[mode][1] for _, added in rounds) * 1e6
            middle = statistics.median(later)
            spread = f"{middle:.0f} ({later[0]:.0f}, {later[-1]:.0f})"
            goal = TASKS[task][2].get(mode, "")
            print(f"{task:22} {plain * 1e3:9.2f}  {name:21} {spread:>27}", end="")
            print(f" {middle / plain / 1e6:7.2%} {goal:>6} {first:16.0f}", flush=True)


if __name__ == "__main__":
    main()

"""Records benchmarks/traces/*.json from real training in float16 on the CPU.

    python benchmarks/traces/record.py                  # what controllers.py reports on: seed 1
    python benchmarks/traces/record.py --tuning         # what settings were tuned on: seed 0
    python benchmarks/traces/record.py --only gpt rl

At every step: the largest parameter gradient, and the largest float16 gradient that the backward
pass held at a module's border or made for a weight; both without the scale. A batch that overflows
is computed again at a lower scale, so that what is written is true. Takes a few minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "examples")]

GOAL = 8  # log2 that the peak is brought to: far from both ends of float16
# A module that is fed with indices has no gradient to send on; what enters it is looked at.
warnings.filterwarnings("ignore", "Full backward hook is firing when gradients are computed")
FLOAT32 = (nn.LayerNorm, nn.Embedding)  # autocast leaves their gradients in float32


class Peaks:
    """The largest float16 gradient that entered or left a module."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[Tensor] = []
        for module in model.modules():
            module.register_full_backward_hook(self._look)

    def _look(self, module: nn.Module, entering: Any, leaving: Any) -> None:
        halves = (g for g in (*entering, *leaving) if g is not None and g.dtype == torch.float16)
        self.found += [g.abs().max() for g in halves if g.numel()]

    def take(self) -> float:
        peak = torch.stack(self.found).max().item() if self.found else 0.0
        self.found.clear()
        return peak


def amax(params: list[nn.Parameter]) -> float:
    return max((p.grad.abs().max().item() for p in params if p.grad is not None), default=0.0)


def record(
    folder: Path,
    name: str,
    what: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Any],
    loss: Callable[[Any], Tensor],
    steps: int,
    max_norm: float = 1.0,
    after: Callable[[], Any] = lambda: None,
) -> None:
    """Trains, and writes folder/`name`.json. `batch` and `loss` are called under autocast."""
    everything = list(model.parameters())
    halves = [p for m in model.modules() if not isinstance(m, FLOAT32) for p in m.parameters(False)]
    peaks, scale = Peaks(model), 2.0**10
    seen: dict[str, list[Any]] = {"log2_amax": [], "log2_peak": [], "zero": []}
    for step in track(range(steps), name):
        with torch.autocast("cpu", torch.float16):
            data = batch(step)
        state = torch.get_rng_state()
        while True:
            torch.set_rng_state(state)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                value = loss(data)
            (value * scale).backward()
            shown, peak = amax(everything), max(peaks.take(), amax(halves))
            if math.isfinite(shown) and math.isfinite(peak):
                break
            scale /= 2.0**6
            if scale < 2.0**-24:
                raise RuntimeError(f"{name}: step {step} is not finite at any scale")
        if shown == 0:
            seen["zero"].append(step)
        for key, found in (("log2_amax", shown), ("log2_peak", peak)):
            seen[key].append(round(math.log2(found / scale), 2) if found else 0.0)
        for p in everything:
            if p.grad is not None:
                p.grad /= scale
        nn.utils.clip_grad_norm_(everything, max_norm)
        optimizer.step()
        after()
        if peak:
            scale = 2.0 ** (GOAL - math.floor(math.log2(peak / scale)))
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, "what": what, **seen}) + "\n")
    print(f"{path.name}: {steps} steps, {len(seen['zero'])} of them zero")


def gpt(folder: Path) -> None:
    import torch_gpt as example

    text, _, vocabulary = example.load_text()
    model = example.GPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.LR, fused=True)
    steps = 250
    scheduler = example.warmup_cosine(optimizer, steps)
    record(
        folder,
        "gpt",
        "examples/torch_gpt.py, 250 steps",
        model,
        optimizer,
        lambda step: example.sample_batch(text),
        lambda data: model(*data),
        steps,
        example.MAX_NORM,
        scheduler.step,
    )


def rl(folder: Path) -> None:
    import torch_rl_fp16 as example

    model = example.make_model()
    answers: list[Any] = []

    def batch(step: int) -> Any:
        if step % example.UPDATES == 0:
            answers[:] = [example.make_batch(model)]
        return answers[0]

    record(
        folder,
        "rl",
        "examples/torch_rl_fp16.py, 300 steps",
        model,
        example.make_optimizer(model),
        batch,
        lambda data: example.policy_loss(model, data),
        300,
        example.MAX_NORM,
    )


def rnn(folder: Path) -> None:
    from tasks.recurrent import Recurrent

    task = Recurrent()
    model = task.model()
    record(
        folder,
        "rnn",
        "the recurrent task of benchmarks/training.py, 300 steps",
        model,
        task.optimizer(model),
        lambda step: task.batch(model, step),
        lambda data: task.loss(model, data),
        300,
        task.max_norm or math.inf,
    )


RUNS = {"gpt": gpt, "rl": rl, "rnn": rnn}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record traces of gradients.")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--tuning", action="store_true", help="the run that settings are tuned on")
    options = parser.parse_args()
    for chosen in options.only:
        torch.manual_seed(0 if options.tuning else 1)
        RUNS[chosen](HERE / "tuning" if options.tuning else HERE)

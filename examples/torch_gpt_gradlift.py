"""The training of torch_gpt.py with gradlift: what went wrong, why, where, and what it cost.

    python examples/torch_gpt_gradlift.py                         # two minutes on two cores
    python examples/torch_gpt_gradlift.py --rule dynamic          # what PyTorch would do
    python examples/torch_gpt_gradlift.py --journal run.jsonl     # records every step

The scale starts at 2^32, far too high, so the first backward passes overflow. `train_step` computes
such a batch again at a lower scale, so that none is lost, and the rule jumps to a scale that fits
as soon as it has seen one clean batch. The learning rate schedule moves only with the weights.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from itertools import groupby
from pathlib import Path

import torch
import torch_gpt as gpt
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from gradlift import Journal
from gradlift.journal import Event
from gradlift.torch import GradScaler

RULE = "auto:init_scale=2^32"


def train(
    steps: int, seed: int, rule: str, journal: Journal | None
) -> tuple[float, GradScaler, list[Event]]:
    """The float16 run: its held-out loss, its scaler, and every overflow."""
    torch.manual_seed(seed)
    text, heldout, vocabulary = gpt.load_text()
    model = gpt.GPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt.LR, fused=True)
    scheduler = gpt.warmup_cosine(optimizer, steps)
    events: list[Event] = []
    scaler = GradScaler("cpu", rule=rule, names=model, journal=journal, on_event=events.append)

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = model(*batch)
        bar.update(task, loss=loss.item())
        return loss

    with Progress(*gpt.COLUMNS) as bar:
        task = bar.add_task("float16", total=steps, loss=math.nan)
        for _ in range(steps):
            batch = gpt.sample_batch(text)  # not in the closure: a retry is of the same batch
            scaler.train_step(
                closure,
                optimizer,
                max_norm=gpt.MAX_NORM,
                retries=6,
                model=model,
                scheduler=scheduler,
            )
            bar.advance(task)
    return gpt.heldout_loss(model, heldout), scaler, events


def power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column)
    return made


def trouble(events: list[Event]) -> Table:
    """One row a step: what became of it, and which gradients were not finite at the first try."""
    made = table("What went wrong", "step", "outcome", "cause", "scale", "culprits")
    for step, group in groupby(events, key=lambda event: event.step):
        happened = list(group)
        first, last = happened[0].detail, happened[-1].detail
        retries = sum(event.what == "retry" for event in happened)
        outcome = "skipped" if happened[-1].what == "skip" else "applied"
        culprits = first["culprits"] or ["unknown"]
        more = f" + {len(culprits) - 1}" if len(culprits) > 1 else ""
        made.add_row(
            str(step),
            f"{outcome}, retried {retries} x",
            first["cause"].lower(),
            f"{power(first['scale'])} -> {power(last['next_scale'])}",
            culprits[0] + more,
        )
    return made


def summary(
    half: float, single: float, steps: int, scaler: GradScaler, events: list[Event]
) -> Table:
    """The float16 run beside the float32 one."""
    recomputed = {event.step for event in events if event.what == "retry"}
    lost = {event.step for event in events if event.what == "skip"}
    causes = Counter(event.detail["cause"].lower() for event in events)
    made = table("Float16 beside float32", "", "float16", "float32")
    made.add_row("held-out loss", f"{half:.3f}", f"{single:.3f}")
    made.add_row("steps applied", str(steps - scaler.skipped_steps), str(steps))
    made.add_row("skipped steps", str(scaler.skipped_steps), "0")
    made.add_row("batches recomputed", str(len(recomputed)), "-")
    made.add_row("... and so saved", str(len(recomputed - lost)), "-")
    made.add_row("causes", ", ".join(f"{n} x {c}" for c, n in causes.items()) or "none", "-")
    made.add_row("final scale", power(scaler.get_scale()), "-")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a character-level GPT with gradlift.")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", default=RULE, help="how the scale moves; default: %(default)s")
    parser.add_argument("--journal", type=Path, help="record the float16 run here")
    options = parser.parse_args()
    console = Console()
    if options.rule == RULE:
        console.print("The scale starts far too high on purpose; watch the first batch overflow.")
    journal = Journal(options.journal) if options.journal else None
    half, scaler, events = train(options.steps, options.seed, options.rule, journal)
    if journal:
        journal.close()
    _, single = gpt.train(options.steps, options.seed, gpt.LR, "float32", None, None)
    if events:
        console.print(trouble(events))
    console.print(summary(half, single, options.steps, scaler, events))

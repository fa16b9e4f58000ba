"""gradlift demo: a small network with a tiny loss, trained in five ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import GradliftError

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray]

DEPTH, WIDTH, BATCH = 8, 32, 128
LOSS_WEIGHT = 2.0**-26  # tiny, like an auxiliary term, or the advantages of a policy gradient

CONTENDERS = (
    ("float32", "off", "float32"),
    ("float16 unscaled", "static:1", "float16"),
    ("float16 static:2^10", "static:2^10", "float16"),
    ("float16 dynamic", "dynamic", "float16"),
    ("float16 auto", "auto", "float16"),
)


class Training(NamedTuple):
    loss: float
    skipped: int
    retries: int
    flushed: float
    scale: float


@click.command()
@click.option("--steps", default=300, show_default=True, help="Steps of each run.")
@click.option("--seed", default=0, show_default=True)
def demo(steps: int, seed: int) -> None:
    """Train a small network in float16 NumPy arrays, with and without loss scaling."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise GradliftError("the demo needs NumPy: pip install 'gradlift[numpy]'") from None
    console = Console()
    console.print(
        f"\n{DEPTH} layers, a hand-written backward pass, a loss weighted by 2^-26.\n"
        "Adam on FP32 master weights, gradients clipped at norm 1.\n"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", style="bold")
    for title in ("loss", "skipped", "retried", "flushed", "last scale"):
        table.add_column(title, justify="right")
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bars = [progress.add_task(title, total=steps) for title, _, _ in CONTENDERS]
        for bar, (title, rule, dtype) in zip(bars, CONTENDERS):
            done = train(rule, dtype, steps, seed, partial(progress.advance, bar))
            table.add_row(
                title,
                f"{done.loss:.4f}",
                str(done.skipped),
                str(done.retries),
                f"{done.flushed:.1%}",
                "-" if rule == "off" else f"2^{math.log2(done.scale):.0f}",
            )
    console.print(table)
    console.print(
        "A network that learned nothing has loss 1. Flushed: the share of weight gradients\n"
        "that float16 rounded to zero.\n"
    )


def train(rule: str, dtype: str, steps: int, seed: int, tick: Callable[[], Any]) -> Training:
    """Trains from scratch and returns the figures."""
    import numpy as np

    from ..numpy import Masters, Scaler

    rng = np.random.default_rng(seed)
    weights = _init(rng, dtype)
    masters, scaler, adam = Masters(weights), Scaler(rule), Adam()
    losses, flushed, retries = [], [], 0
    for _ in range(steps):
        x = rng.uniform(-1, 1, (BATCH, 2)).astype(dtype)
        batch = partial(_loss_and_gradients, weights, x, _target(x))
        computed: list[tuple[float, Arrays]] = []

        def compute(scale: float, batch: Any = batch, computed: list[Any] = computed) -> Any:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                computed.append(batch(scale))
            return computed[-1]

        result = scaler.train_step(compute, masters, adam.update, max_norm=1.0, retries=4)
        loss, grads = computed[-1]
        losses.append(loss / LOSS_WEIGHT)
        zeros = sum(int((g == 0).sum()) for g in grads.values())
        flushed.append(zeros / sum(g.size for g in grads.values()))
        retries += result.retries
        tick()
    tail = max(1, steps // 10)
    return Training(
        float(np.mean(losses[-tail:])),
        scaler.skipped_steps,
        retries,
        float(np.mean(flushed)),
        scaler.get_scale(),
    )


def _target(x: np.ndarray) -> np.ndarray:
    import numpy as np

    y = np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:])
    unit: np.ndarray = (y / 0.46).astype(x.dtype)  # unit variance: guessing zero costs 1.0
    return unit


def _init(rng: np.random.Generator, dtype: str) -> Arrays:
    import numpy as np

    sizes = [2, *[WIDTH] * (DEPTH - 1), 1]
    layers: Arrays = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        spread = 1.3 / math.sqrt(fan_in)
        layers[f"layer{i}.weight"] = (spread * rng.standard_normal((fan_in, fan_out))).astype(dtype)
        layers[f"layer{i}.bias"] = np.zeros(fan_out, dtype)
    return layers


def _loss_and_gradients(
    weights: Arrays, x: np.ndarray, y: np.ndarray, scale: float
) -> tuple[float, Arrays]:
    """Mean squared error, and the gradients of it times `scale`, all in the arrays' own dtype."""
    import numpy as np

    kept = [x]
    for i in range(DEPTH):
        x = x @ weights[f"layer{i}.weight"] + weights[f"layer{i}.bias"]
        if i < DEPTH - 1:
            x = np.tanh(x)
            kept.append(x)
    error = (x - y).astype(np.float32)
    loss = float((error**2).mean()) * LOSS_WEIGHT
    back = (error * np.float32(2 * LOSS_WEIGHT * scale / len(error))).astype(y.dtype)
    grads: Arrays = {}
    for i in reversed(range(DEPTH)):
        grads[f"layer{i}.weight"] = kept[i].T @ back
        grads[f"layer{i}.bias"] = back.sum(0)
        if i:
            back = (back @ weights[f"layer{i}.weight"].T) * (1 - kept[i] * kept[i])
    return loss, dict(reversed(grads.items()))


class Adam:
    """Adam in float32, written out so that the demo needs nothing but NumPy."""

    def __init__(self, lr: float = 3e-3, eps: float = 1e-14) -> None:
        self.lr, self.eps, self.count = lr, eps, 0
        self.mean: Arrays = {}
        self.square: Arrays = {}

    def update(self, weights: Arrays, grads: Arrays) -> None:
        self.count += 1
        for name, g in grads.items():
            self.mean[name] = 0.9 * self.mean.get(name, 0) + 0.1 * g
            self.square[name] = 0.99 * self.square.get(name, 0) + 0.01 * g * g
            mean = self.mean[name] / (1 - 0.9**self.count)
            square = self.square[name] / (1 - 0.99**self.count)
            weights[name] -= self.lr * mean / (square**0.5 + self.eps)

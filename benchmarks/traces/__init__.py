"""Traces that controllers are run on: made ones, and ones recorded from real training.

A trace is two series over steps: log2 of the largest parameter gradient, which a rule sees, and
log2 of the largest float16 gradient anywhere in the backward pass, which decides about overflow.

Made traces, 20,000 steps (RL: 600), all in bits:

    amax = base + N(0, 0.8) + a slow wander of 0.3       base: uniform in -12 .. -4
    peak = amax + gap
    gap  = 0, or hidden: clip(g + a slow wander of 0.5 + N(0, 0.5), 0, 6), g: uniform in 0 .. 6

    stationary  as it is
    spikes      one step in 250 is higher by 3 to 9 bits
    shifts      6 to 8 times the level falls or rises by 8 to 10 bits, for good
    RL          600 steps, base about -22
    drift       falls by 12 bits and rises again (or the other way round), at a constant pace

Each seed gives two traces of a kind: one without and one with hidden peaks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("stationary", "spikes", "shifts", "RL", "drift")
STEPS, RL_STEPS = 20_000, 600
TUNING = Path(__file__).parent / "tuning"

Series = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """log2 of parameter amax (-inf where all gradients were 0) and of the true peak, by step."""

    kind: str
    label: str
    amax: Series
    peak: Series


def wander(rng: np.random.Generator, steps: int, slowness: float, size: float) -> Series:
    """A first-order random wander of standard deviation `size`, forgotten in `slowness` steps."""
    keep = math.exp(-1 / slowness)
    pushes = rng.normal(0, size * math.sqrt(1 - keep * keep), steps)
    out, value = np.empty(steps), rng.normal(0, size)
    for i, push in enumerate(pushes):
        value = keep * value + push
        out[i] = value
    return out


def shifts(rng: np.random.Generator, steps: int) -> Series:
    """Down by 8 to 10 bits, back up, down again, ..."""
    count = int(rng.integers(6, 9))
    level, out = 0.0, np.zeros(steps)
    for at in np.sort(rng.choice(np.arange(1, 20), count, replace=False)) * steps // 20:
        level += rng.uniform(8, 10) * (-1 if level >= 0 else 1)
        out[at:] = level
    return out


def make(kind: str, seed: int, hidden: bool, steps: int | None = None) -> Trace:
    """One made trace."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    steps = steps or (RL_STEPS if kind == "RL" else STEPS)
    base = rng.uniform(-12, -4) if kind != "RL" else rng.uniform(-23, -21)
    amax = base + rng.normal(0, 0.8, steps) + wander(rng, steps, 300, 0.3)
    if kind == "spikes":
        amax += (rng.random(steps) < 1 / 250) * rng.uniform(3, 9, steps)
    if kind == "shifts":
        amax += shifts(rng, steps)
    if kind == "drift":
        turn = (np.arange(steps) / steps + rng.uniform()) % 1
        amax += 12 * np.abs(2 * turn - 1) - 12
    gap = np.zeros(steps)
    if hidden:
        gap = rng.uniform(0, 6) + wander(rng, steps, 1000, 0.5) + rng.normal(0, 0.5, steps)
        gap = np.clip(gap, 0, 6)
    return Trace(kind, f"{kind} {seed}{' hidden' if hidden else ''}", amax, amax + gap)


def made(kinds: Iterable[str], seeds: Iterable[int], steps: int | None = None) -> list[Trace]:
    """Of each kind and seed, one without and one with hidden peaks."""
    seeds = list(seeds)
    return [make(k, s, hidden, steps) for k in kinds for s in seeds for hidden in (False, True)]


def read(path: Path) -> Trace:
    """A recorded trace: {"name", "what", "log2_amax", "log2_peak", "zero": [steps]}."""
    data: dict[str, Any] = json.loads(path.read_text())
    amax, peak = (np.array(data[k], dtype=float) for k in ("log2_amax", "log2_peak"))
    if amax.shape != peak.shape or amax.ndim != 1:
        raise ValueError(f"{path}: log2_amax and log2_peak must be lists of one length")
    amax[data["zero"]] = peak[data["zero"]] = -np.inf
    return Trace(f"recorded {data['name']}", data["what"], amax, peak)


def recorded(folder: Path = Path(__file__).parent) -> list[Trace]:
    """Every trace in this folder; `record.py` wrote them."""
    return [read(path) for path in sorted(folder.glob("*.json"))]

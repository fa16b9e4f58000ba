"""Findings about the forward pass: units that are off, activations near the end of float16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from ...formats import FP16
from ...journal import Run
from ..words import count, percent
from .finding import SHOWN, Finding
from .underflow import dead_layers

SAMPLES = 2
OFF = 0.9999  # share of a layer's outputs that are zero: no unit is on
RELUS = ("ReLU", "ReLU6", "LeakyReLU", "Threshold")
NEAR = FP16.max / 4  # two bits below the largest number
HUGE = 1e7  # no network that trains has such activations
ROSE = 10.0  # times its first size


def _rows(run: Run, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for look in run.forwards:
        if name in look.modules:
            yield look.step, look.modules[name]


def _modules(run: Run) -> list[str]:
    return list(dict.fromkeys(name for look in run.forwards for name in look.modules))


def dead_relu(run: Run) -> Finding | None:
    """Activations that are zero for every input."""
    off: dict[str, int] = {}
    for name in _modules(run):
        rows = list(_rows(run, name))
        late = rows[len(rows) // 2 :]
        relu = rows and rows[0][1].get("type") in RELUS
        if relu and len(late) >= SAMPLES and all(r.get("zero", 0) >= OFF for _, r in late):
            off[name] = late[0][0]
    if not off:
        return _all_negative(run)
    names = ", ".join(list(off)[:3])
    return Finding(
        "broken",
        f"All units are off in {names}",
        f"{count(len(off), 'activation')} gave zero for at least {percent(OFF)} of the outputs in "
        f"every look since step {min(off.values())}: no gradient passes.",
        tuple(off.values())[:SHOWN],
        (),
        "Lower the learning rate or the initial bias, so that units do not leave their range; or "
        "use LeakyReLU, GELU or a normalisation in front.",
        "dead-relu",
        confidence="certain",
    )


def _all_negative(run: Run) -> Finding | None:
    """A layer whose outputs are all negative, and that has no gradient: a ReLU that is no module
    comes behind it."""
    found: dict[str, float] = {}
    for name in dead_layers(run):
        rows = [row for _, row in _rows(run, name)]
        late = rows[len(rows) // 2 :]
        if len(late) >= SAMPLES and all(row.get("top", 0) < 0 for row in late):
            found[name] = max(row["top"] for row in late)
    if not found:
        return None
    name = next(iter(found))
    return Finding(
        "broken",
        f"All units behind {', '.join(list(found)[:3])} are off",
        f"The outputs of {name} were all negative ({found[name]:.3g} at most) and its gradients "
        "all zero: a ReLU behind it gives zero for every input, and no gradient passes.",
        (),
        tuple(p for p in run.samples[-1].parameters if p.rpartition(".")[0] in found)[:SHOWN],
        "Lower the learning rate or the initial bias, so that units do not leave their range; or "
        "use LeakyReLU, GELU or a normalisation in front.",
        "dead-relu",
    )


def exploding_forward(run: Run) -> Finding | None:
    """Activations that no 16-bit format should hold."""
    worst, at, where, dtype = 0.0, 0, "", ""
    for look in run.forwards:
        for name, row in look.modules.items():
            top = row.get("amax", 0.0)
            if HUGE < top < math.inf and top > worst:
                worst, at, where, dtype = top, look.step, name, str(row.get("dtype"))
    if not where:
        return None
    return Finding(
        "broken",
        f"Activations explode in {where}",
        f"At step {at} the largest output of {where} was {worst:.3g} ({dtype}); float16 ends at "
        "65504.",
        (at,),
        (),
        "Keep recurrent or repeated maps from growing: a spectral norm of 1 at most, a "
        "normalisation inside the recurrence, a smaller initialisation, shorter sequences.",
        "exploding",
        confidence="certain",
    )


def near_overflow(run: Run) -> Finding | None:
    """Activations in float16 that come close to its largest number."""
    tops: dict[str, list[float]] = {}
    for look in run.forwards:
        for name, row in look.modules.items():
            if row.get("dtype") == "float16" and row.get("amax", math.inf) < math.inf:
                tops.setdefault(name, []).append(row["amax"])
    near = {name: max(values) for name, values in tops.items() if max(values) >= NEAR}
    if not near:
        return None
    name = max(near, key=lambda n: near[n])
    rising = median(tops[name][-3:]) > 2 * median(tops[name][:3])
    return Finding(
        "hint",
        f"Activations of {name} come close to float16's end",
        f"The largest output was {near[name]:.5g} of 65504"
        + (", and it is rising." if rising else "."),
        (),
        (),
        "Run this module in float32 or bfloat16, or normalise what it is given.",
        "forward-overflow",
    )

"""Findings about the course of the loss and of the gradients by depth."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import median

from ...journal import Run, Step
from ..words import count
from .finding import Finding, loss_failed, numbers, per_key
from .underflow import dead_layers

ROSE = 10.0  # times the loss at the start
FIRST = 3  # steps whose median is the start
LEAP = 0.5  # |update| / |weight| in a first step: no weight may be half new
REPLACED = 1.0  # the same, in any step
EARLY = 20  # steps
SPIKE = 20.0  # times the usual loss, and back again
AROUND = 10  # steps before and after a spike that show what is usual
VANISHED = 14  # bits between the first layer's gradients and the last's
LAYERS = 4
SHRINKS = 0.5  # what a recurrent matrix leaves of a state: torch's own start leaves 0.58


@per_key
def diverging(steps: list[Step], run: Run) -> Finding | None:
    """The loss rises by a large factor, before anything is non-finite."""
    end = next((i for i, s in enumerate(steps) if loss_failed(s)), len(steps))
    if end == 0 or (end < len(steps) and not all(map(loss_failed, steps[end : end + FIRST]))):
        return None
    before = [s for s in steps[:end] if math.isfinite(s.loss)]
    at, leap = _leap(run, steps[end].step) if end < len(steps) else (0, 0.0)
    if leap >= LEAP and (end <= EARLY or leap >= REPLACED):
        return Finding(
            "broken",
            "The updates are far too large",
            f"An update of step {at} was {leap:.2g} times the size of its weight (the median of "
            f"all parameters), and the loss was not finite from step {steps[end].step} on.",
            numbers(steps[end : end + 1]),
            (),
            "Lower the learning rate: an update of a hundredth of its weight is usual.",
            "diverging",
        )
    if len(before) < 4:
        return None
    n = min(FIRST, len(before) // 2)
    first = median(abs(s.loss) for s in before[:n])
    last = median(abs(s.loss) for s in before[-n:])
    if end == len(steps) and (worse := _worse(before)):
        return worse
    low = min(range(len(before)), key=lambda i: before[i].loss)
    rise = before[low:]
    up = sum(b.loss > a.loss for a, b in pairwise(rise))
    if not 0 < ROSE * first < last or len(rise) < 4 or up < 0.6 * (len(rise) - 1):
        return None
    lr = next((s.lr for s in steps if s.lr == s.lr), math.nan)
    rate = f" with a learning rate of {lr:g}" if lr == lr else ""
    over = " until it was not finite" if end < len(steps) else ""
    norms = [s.norm for s in before if math.isfinite(s.norm)]
    grew = f"; the norm went from {norms[0]:.3g} to {norms[-1]:.3g}" if len(norms) > 1 else ""
    return Finding(
        "broken",
        "Training diverges",
        f"The loss rose from {first:.3g} to {last:.3g} in {count(len(rise), 'step')}{over}{rate}"
        f"{grew}. The rise came first.",
        numbers(rise[-FIRST:]),
        (),
        f"Lower the learning rate{f' (to {lr / 10:g}, say)' if lr == lr else ''}, warm it up, or "
        "clip the gradients.",
        "diverging",
        "",
        "likely",
    )


def _leap(run: Run, end: int) -> tuple[int, float]:
    """The largest |update| / |weight| of the samples shortly before a step, the median of all
    parameters, and its step."""
    found = [(0, 0.0)]
    for sample in run.weights:
        rows = sample.parameters.values()
        ratios = [f["update"] / f["rms"] for f in rows if f.get("rms", 0) > 0 and "update" in f]
        known = [r for r in ratios if r == r]
        if known and end - EARLY <= sample.step < end:
            found.append((sample.step, median(known)))
    return max(found, key=lambda pair: pair[1])


def _worse(steps: list[Step]) -> Finding | None:
    """Loss and norm rise together over the run, though not in each step."""
    n = len(steps) // 10
    norms = [s for s in steps if math.isfinite(s.norm)]
    if n < FIRST or len(norms) < 2 * FIRST or min(s.loss for s in steps) < 0:
        return None
    first, last = (median(s.loss for s in part) for part in (steps[:n], steps[-n:]))
    small, large = (median(s.norm for s in part) for part in (norms[:FIRST], norms[-FIRST:]))
    if last < ROSE * max(first, 1e-12) or large < ROSE * max(small, 1e-12):
        return None
    lr = next((s.lr for s in steps if s.lr == s.lr), math.nan)
    return Finding(
        "broken",
        "Training gets worse",
        f"The loss rose from {first:.3g} to {last:.3g} (medians of the first and last "
        f"{count(n, 'step')}), and the norm from {small:.3g} to {large:.3g}.",
        numbers(steps[-n:]),
        (),
        f"Lower the learning rate{f' (to {lr / 10:g}, say)' if lr == lr else ''}, warm it up, or "
        "clip the gradients.",
        "diverging",
    )


@per_key
def spike(steps: list[Step], run: Run) -> Finding | None:
    """Single losses far above those around them, from which training recovers."""
    known = [s for s in steps if math.isfinite(s.loss)]
    found = []
    for i, s in enumerate(known[AROUND:-AROUND], AROUND):
        around = [abs(x.loss) for x in (*known[i - AROUND : i], *known[i + 1 : i + 1 + AROUND])]
        if abs(s.loss) > SPIKE * max(median(around), 1e-12) and abs(s.loss) > 3 * max(around):
            found.append((s, median(around)))
    if not found or len(found) > len(known) // 20:
        return None
    worst, usual = max(found, key=lambda pair: pair[0].loss)
    return Finding(
        "hint",
        f"The loss spikes at step {worst.step}, and recovers",
        f"It was {worst.loss:.3g} there and {usual:.3g} around it; "
        f"{count(len(found), 'step')} like that in {len(known)}.",
        numbers([s for s, _ in found]),
        (),
        "Look at this batch: outliers in inputs or targets. Clipping the norm, or a loss that "
        "grows less than the square, limits what one batch can do.",
        "spike",
        "",
        "certain",
    )


def vanishing(run: Run) -> Finding | None:
    """Gradients that get smaller, layer by layer or step by step of a recurrence."""
    return _through_time(run) or _through_depth(run)


def _through_time(run: Run) -> Finding | None:
    """A recurrence whose matrix shrinks what it is given, and a layer before it without any
    gradient."""
    empty = dead_layers(run)
    sizes = run.header.get("parameters")
    if not isinstance(sizes, dict):
        return None
    radius: dict[str, list[float]] = {}
    for sample in run.weights:
        for name, facts in sample.parameters.items():
            size = sizes.get(name, 0)
            square = isinstance(size, int) and size > 0 and math.isqrt(size) ** 2 == size
            if "weight_hh" in name and square and facts.get("rms", 0) > 0:
                radius.setdefault(name, []).append(facts["rms"] * size**0.25)
    small = {name: median(found) for name, found in radius.items() if median(found) < SHRINKS}
    if not empty or not small:
        return None
    name = min(small, key=lambda n: small[n])
    return Finding(
        "warning",
        f"Gradients vanish in the recurrence of {name.rpartition('.')[0] or name}",
        f"All gradients of {', '.join(empty[:3])} were zero. {name} shrinks a state to about "
        f"{small[name]:.2g} of its size at each step, and a gradient on its way back by as much: "
        f"after 20 steps {small[name] ** 20:.1g} is left.",
        (),
        (name,),
        f"Start {name} from an orthogonal matrix (nn.init.orthogonal_), or use a GRU or an LSTM.",
        "vanishing",
        "",
        "likely",
    )


def _through_depth(run: Run) -> Finding | None:
    """Gradients that get smaller, layer by layer, towards the input."""
    sizes = run.header.get("parameters")
    order = list(sizes) if isinstance(sizes, dict) else []
    tops: dict[str, list[int]] = {}
    for sample in run.samples:
        for name, facts in sample.parameters.items():
            counts = Counter({int(e): n for e, n in facts.get("exponents", {}).items()})
            if counts:
                tops.setdefault(name, []).append(max(counts))
    layers: dict[str, float] = {}
    for name in order:
        layer = name.rpartition(".")[0] or name
        if name in tops and len(tops[name]) >= 2 and name.endswith("weight"):
            layers.setdefault(layer, median(tops[name]))
    heights = list(layers.values())
    if len(heights) < LAYERS:
        return None
    bits = heights[-1] - heights[0]
    up = sum(b >= a - 1 for a, b in pairwise(heights))
    steps = sum(b - a >= 1 for a, b in pairwise(heights))
    if max(b - a for a, b in pairwise(heights)) > bits / 2:
        return None  # two branches of a network, rather than its depth
    if bits < VANISHED or up < 0.8 * (len(heights) - 1) or steps < 0.5 * (len(heights) - 1):
        return None
    first, last = next(iter(layers)), list(layers)[-1]
    return Finding(
        "warning",
        "Gradients vanish towards the input",
        f"From {last} to {first} the largest gradient shrinks by {bits:.0f} bits, a little in "
        f"each of {len(layers)} layers (the median of {count(len(run.samples), 'sample')}).",
        (),
        tuple(f"{name}.weight" for name in list(layers)[:3]),
        "Use residual connections, a normalisation between the layers, or an activation that does "
        "not saturate (ReLU, GELU). A larger scale cannot help the first layer alone.",
        "vanishing",
        "",
        "likely",
    )

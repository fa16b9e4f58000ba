"""Findings about weights and their updates: not finite, at the end of their range; updates rounded
away, swallowed by eps, clipping or decay; too large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from ...core import Cause
from ...core.result import WEIGHTS_NONFINITE
from ...formats import FP16
from ...journal import Event, Run, Step
from ..words import count, percent
from .calls import orders
from .finding import SHOWN, Finding, leader, numbers, per_key

SAMPLES = 3
LOST = 0.5  # share of updates that leave the weight as it is
SMALL = 1e-6  # |update| / |weight|: a million steps to move a weight by its own size
MOST = 0.75  # of the parameters
BELOW = 0.9  # share of second moments below eps
TIGHT = 1e3  # the norm over max_norm, on nearly all steps
SHRUNK = 0.1  # of their first size
NARROW = ("float16", "bfloat16")


def _rows(run: Run) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for sample in run.weights:
        for name, facts in sample.parameters.items():
            yield sample.step, name, facts


def _by_name(run: Run, field: str) -> dict[str, list[float]]:
    """A field's numbers in the samples, by parameter; only of those that are in every sample."""
    found: dict[str, list[float]] = {}
    for _, name, facts in _rows(run):
        value = facts.get(field)
        if isinstance(value, (int, float)):
            found.setdefault(name, []).append(float(value))
    return {name: values for name, values in found.items() if len(values) >= SAMPLES}


def _groups(run: Run) -> list[dict[str, Any]]:
    """The settings of every optimizer's groups, each with its optimizer's type."""
    found = []
    for event in run.events:
        if event.what == "optimizer":
            for group in event.detail.get("groups") or []:
                if isinstance(group, dict):
                    found.append({**group, "type": str(event.detail.get("type", ""))})
    return found


def ratios(run: Run) -> list[float]:
    """|update| / |weight| of every parameter and sample where both are known and not zero."""
    return [
        facts["update"] / facts["rms"]
        for _, _, facts in _rows(run)
        if facts.get("rms", 0) > 0 and facts.get("update", math.nan) == facts.get("update")
    ]


def eps_zero(run: Run) -> Finding | None:
    """An eps that is 0 in the parameters' float16."""
    for group in _groups(run):
        eps = group.get("eps")
        half = "float16" in (group.get("dtypes") or [])
        kind = group["type"].rpartition(".")[2]
        if eps == 0 and not isinstance(eps, bool) and "betas" in group:
            return Finding(
                "warning",
                f"{kind}'s eps is 0",
                "With eps=0 an element whose gradients were all zero is divided by zero: 0/0 is "
                "NaN. Rows of an embedding that never occurred have such gradients.",
                (),
                (),
                "Pass eps=1e-8, the default.",
                "eps-zero",
                confidence="certain",
            )
        if half and isinstance(eps, float) and 0 < eps < FP16.smallest_subnormal / 2:
            return Finding(
                "broken",
                f"{kind}'s eps is 0 in float16",
                f"eps={eps:g} is below float16's smallest number, 2^-24, and the parameters are "
                "float16: where a second moment vanishes the step divides by zero.",
                (),
                (),
                f"Keep the parameters in float32 under autocast, or wrap the optimizer in "
                f"gradlift.torch.MasterWeights({kind}, ...).",
                "eps-zero",
                confidence="certain",
            )
    return None


def fp16_parameters(run: Run) -> Finding | None:
    """A plain optimizer steps float16 parameters."""
    groups = [g for g in _groups(run) if "float16" in (g.get("dtypes") or [])]
    if not groups or "gradlift" in groups[0]["type"]:
        return None
    kind = groups[0]["type"].rpartition(".")[2]
    return Finding(
        "warning",
        f"{kind} steps float16 parameters without float32 masters",
        f"{count(sum(g.get('parameters', 0) for g in groups), 'parameter')} are float16: an update "
        "below 2^-11 of a weight is rounded away, and moments underflow.",
        (),
        (),
        "Keep the model in float32 and use torch.autocast, or wrap the optimizer in "
        f"gradlift.torch.MasterWeights({kind}, ...).",
        "fp16-parameters",
        confidence="certain",
    )


def updates_lost(run: Run) -> Finding | None:
    """16-bit weights whose updates are mostly rounded away."""
    narrow = {name for _, name, facts in _rows(run) if facts.get("dtype") in NARROW}
    shares = {n: median(v) for n, v in _by_name(run, "unchanged").items() if n in narrow}
    lost = {name: share for name, share in shares.items() if share >= LOST}
    if not lost or 2 * len(lost) < len(shares):
        return None
    dtype = next(f["dtype"] for _, name, f in _rows(run) if name in lost)
    worst = max(lost, key=lambda name: lost[name])
    return Finding(
        "broken",
        f"Updates are rounded away in {dtype} weights",
        f"In {len(lost)} of {count(len(shares), 'parameter')} most elements that have a gradient "
        f"did not change by a step ({percent(lost[worst])} in {worst}, the median of "
        f"{count(len(run.weights), 'sample')}): the update is smaller than the weight's last bit.",
        tuple(s.step for s in run.weights[:SHOWN]),
        tuple(list(lost)[:SHOWN]),
        "Keep float32 weights (autocast), or float32 masters: gradlift.torch.MasterWeights.",
        "updates-lost",
        confidence="certain",
    )


def eps_swallows(run: Run) -> Finding | None:
    """Adam's eps is larger than the roots of nearly all second moments."""
    shares = {name: values[-1] for name, values in _by_name(run, "below_eps").items()}
    below = [name for name, share in shares.items() if share >= BELOW]
    if not below or len(below) < MOST * len(shares):
        return None
    eps = max((g["eps"] for g in _groups(run) if isinstance(g.get("eps"), float)), default=math.nan)
    return Finding(
        "warning",
        "eps is larger than the gradients",
        f"In {len(below)} of {count(len(shares), 'parameter')} the root of the second moment is "
        f"below eps={eps:g} for {percent(BELOW)} of the elements or more: the optimizer then "
        "divides by eps alone, and steps in proportion to gradients that are tiny.",
        (run.weights[-1].step,),
        tuple(below[:SHOWN]),
        "Lower eps to well below the gradients' size (Adam's default is 1e-8), or multiply the "
        "loss by a constant.",
        "eps-swallows",
        confidence="certain",
    )


def clip_too_tight(run: Run) -> Finding | None:
    """max_norm is so small that nothing moves."""
    limits = [
        (float(call.fact), call)
        for calls in orders(run)
        for call in calls.order
        if "clip_grad_" in call.name and _is_number(call.fact)
    ]
    if not limits:
        return None
    limit, call = limits[0]
    by_value = "value" in call.name
    sizes = [(s, s.amax / s.scale if by_value else s.norm) for s in run.steps if not s.skipped]
    known = [(s, size) for s, size in sizes if size == size]
    over = [(s, size) for s, size in known if size > TIGHT * limit]
    moved = ratios(run)
    if not known or len(over) < BELOW * len(known) or not moved or median(moved) > 100 * SMALL:
        return None
    size = median(size for _, size in over)
    what = "largest gradient" if by_value else "norm"
    return Finding(
        "broken",
        "Clipping leaves nothing of the gradients",
        f"{call.name} clips at {limit:g}, and the {what} was {size:.3g} (median of "
        f"{count(len(over), 'step')}), {size / limit:.3g} times as large; an update is "
        f"{median(moved):.1e} of its weight.",
        numbers([s for s, _ in over]),
        (),
        f"Choose a limit near the {what} of ordinary steps, such as {_round(size)}.",
        "clip-too-tight",
        call.place,
        "certain",
    )


def decay_wins(run: Run) -> Finding | None:
    """Weight decay shrinks the weights to nothing."""
    decays = [g["weight_decay"] for g in _groups(run) if isinstance(g.get("weight_decay"), float)]
    sizes = _by_name(run, "rms")
    sizes = {name: values for name, values in sizes.items() if values[0] > 0}
    shrunk = [name for name, values in sizes.items() if values[-1] < SHRUNK * values[0]]
    if not decays or not max(decays) or 2 * len(shrunk) < len(sizes) or not shrunk:
        return None
    worst = min(shrunk, key=lambda name: sizes[name][-1] / sizes[name][0])
    return Finding(
        "broken",
        "Weight decay shrinks the weights to nothing",
        f"{len(shrunk)} of {count(len(sizes), 'parameter')} fell below a tenth of their first size "
        f"({worst}: {sizes[worst][0]:.2g} -> {sizes[worst][-1]:.2g}) with "
        f"weight_decay={max(decays):g}.",
        (run.weights[0].step, run.weights[-1].step),
        tuple(shrunk[:SHOWN]),
        f"Lower weight_decay to {max(decays) / 100:g} or less.",
        "decay-wins",
        confidence="likely",
    )


def _is_number(fact: str) -> bool:
    try:
        return float(fact) > 0
    except ValueError:
        return False


def _round(x: float) -> str:
    return f"{float(f'{x:.1g}'):g}"


def weights_nonfinite(run: Run) -> Finding | None:
    """A parameter held inf or NaN before the step: a poisoned checkpoint, a broken start."""
    notes = [
        e for e in run.events if e.what == "note" and e.detail.get("code") == WEIGHTS_NONFINITE
    ]
    if not notes:
        return None
    first = notes[0]
    when = f" at step {first.step}" if first.step is not None else ""
    text = str(first.detail.get("text", "weights were not finite"))
    applied = [s for s in run.steps if s.nonfinite and not s.skipped and _before(s, first)]
    if applied:
        return Finding(
            "broken",
            "An update has made weights not finite",
            f"At step {applied[-1].step} the gradients were not finite and were applied; since "
            f"step {first.step} {text.partition(', so no scale')[0]}.",
            numbers(applied[-1:]),
            (),
            "Look at that step: its batch, its loss, a sqrt, norm or division at zero in the "
            "backward pass. A GradScaler leaves such a step out, "
            "clip_grad_norm_(..., error_if_nonfinite=True) stops at it.",
            "weights-nonfinite",
            confidence="certain",
        )
    return Finding(
        "broken",
        "Weights are not finite",
        f"When a step went wrong{when}, {text}.",
        tuple(e.step for e in notes[:1] if e.step is not None),
        (),
        "Load a checkpoint whose weights are finite; if the run began that way, look at the "
        "initialisation of the named parameter.",
        "weights-nonfinite",
    )


def _before(step: Step, event: Event) -> bool:
    return event.step is not None and step.step < event.step


@per_key
def weight_range(steps: list[Step], run: Run) -> Finding | None:
    """A float32 master left the range of its 16-bit weight, which stays at the range's end."""
    held = [s for s in steps if s.cause is Cause.WEIGHT_RANGE]
    if not held:
        return None
    name, times = leader(held)
    who = f" Most often: {name} ({count(times, 'time')})." if name else ""
    return Finding(
        "warning",
        "Weights at the end of their 16-bit range",
        f"In {count(len(held), 'step')} of {len(steps)} a float32 master left the range of its "
        f"16-bit weight, which stayed at its format's largest number.{who}",
        numbers(held),
        (name,) if name else (),
        "Keep the named layer in float32, or use bfloat16 weights; weights above 65504 mostly "
        "mean that training diverges: lower the learning rate.",
        "weight-range",
    )

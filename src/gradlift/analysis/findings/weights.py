"""Findings about the weights themselves: not finite, or at the end of their 16-bit range."""

from __future__ import annotations

from ...core import Cause
from ...core.result import WEIGHTS_NONFINITE
from ...journal import Event, Run, Step
from ..words import count
from .finding import Finding, leader, numbers, per_key


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

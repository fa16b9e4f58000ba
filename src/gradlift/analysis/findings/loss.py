"""Findings about the loss: not finite before it was scaled; computed in float16."""

from __future__ import annotations

import math

from ...core import HALF_LOSS
from ...journal import Run, Step
from ..words import count
from .calls import orders
from .finding import Finding, loss_failed, numbers, per_key

AT_END = 3  # non-finite losses in a row at the end of a run: more than one bad batch


@per_key
def forward_nan(steps: list[Step], run: Run) -> Finding | None:
    """The loss was inf or NaN before it was scaled: the forward pass is the cause."""
    bad = [s for s in steps if loss_failed(s)]
    if not bad:
        return None
    ended = len(steps) >= AT_END and all(loss_failed(s) for s in steps[-AT_END:])
    broken = ended or 2 * len(bad) > len(steps)
    value = "inf" if math.isinf(bad[0].loss) else "nan"
    skipped = sum(s.skipped for s in bad)
    unknown = any(s.verdict is None for s in bad)
    outcome = "the log does not show whether they were" if unknown else f"{skipped} of them were"
    still = " All of the last steps were like that." if ended else ""
    return Finding(
        "broken" if broken else "warning",
        "The loss itself is not finite",
        f"The loss was inf or NaN in {count(len(bad), 'step')} of {len(steps)}, first at step "
        f"{bad[0].step} (loss {value}); {outcome} skipped. It was not finite before "
        f"it was scaled, so the scale is not the cause.{still}",
        numbers(bad),
        (),
        f"The record does not show where it began: {_where_to_look(run)}",
        "forward-nan",
    )


def _where_to_look(run: Run) -> str:
    """How the framework itself names the operation."""
    framework = run.header.get("framework")
    backend = run.header.get("backend") if framework == "keras" else framework
    if backend == "jax":
        return (
            'jax.config.update("jax_debug_nans", True) makes JAX stop at the first operation that '
            "gives NaN."
        )
    if backend == "tensorflow":
        return (
            "tf.debugging.enable_check_numerics() makes TensorFlow stop at the first operation "
            "that is not finite."
        )
    if run.calls:
        return _looked(run)
    return (
        "record the run with gradlift run, which looks for the first operation, input or buffer "
        "that is not finite."
    )


def _looked(run: Run) -> str:
    """What was done to find the first operation, in a run that gradlift has recorded."""
    notes = [e.detail for e in run.events if e.detail.get("code") == "untraced"]
    if notes:
        return f"{notes[0].get('text')}. Look at inputs, targets and loss of these steps."
    place = next((c.place for o in orders(run) for c in o.order if c.name == "backward"), "")
    line = f" of {place}" if place else ""
    return (
        "inside the model no operation, input, buffer or weight was the first. Look at the "
        f"targets, and at the lines between the model and the backward(){line}."
    )


def half_loss(run: Run) -> Finding | None:
    """The loss was computed in float16, so its scale is capped."""
    notes = [e for e in run.events if e.what == "note" and e.detail.get("code") == HALF_LOSS.code]
    if not notes:
        return None
    largest = max((s.scale for s in run.steps), default=math.nan)
    used = f"; the largest scale used was {largest:g}" if run.steps else ""
    return Finding(
        "warning",
        "The loss is computed in float16",
        f"Noted {count(len(notes), 'time')}: a float16 loss has 11 significant bits, and the "
        f"backward pass casts the scale to float16, so it cannot exceed 32768{used}.",
        tuple(e.step for e in notes[:1] if e.step is not None),
        (),
        "Compute the loss in float32: loss_function(outputs.float(), targets).",
        "half-loss",
    )

"""Findings about the loss: not finite before it was scaled; computed in float16."""

from __future__ import annotations

import math

from ..journal import Run, Step
from ._finding import Finding, loss_failed, lost, numbers, per_key, times

DEAD_AT_END = 3  # non-finite losses in a row at the end: one bad batch is past, this is not
HALF_LOSS = "loss computed in float16"


@per_key
def forward_nan(steps: list[Step], run: Run) -> Finding | None:
    """The loss was inf or NaN before any scale touched it: the forward pass is at fault."""
    bad = [s for s in steps if loss_failed(s)]
    if not bad:
        return None
    ended = len(steps) >= DEAD_AT_END and all(loss_failed(s) for s in steps[-DEAD_AT_END:])
    broken = ended or 2 * len(bad) > len(steps)
    value = "inf" if math.isinf(bad[0].loss) else "nan"
    skipped = sum(lost(s) for s in bad)
    modules = [
        f"{e.detail.get('module')} ({e.detail.get('found', 'nan')}, "
        f"{e.detail.get('where', 'forward')}, step {e.step})"
        for e in run.events
        if e.what == "trace" and e.detail.get("module")
    ]
    traced = f" First module with a non-finite output: {modules[0]}." if modules else ""
    still = " The run ended that way." if ended else ""
    where = f"in {modules[0].split(' (')[0]} " if modules else ""
    hint = "" if modules else "; gradlift run --trace-nan names the module"
    return Finding(
        "broken" if broken else "warning",
        "The loss itself is not finite",
        f"The loss was inf or NaN in {times(len(bad), 'step')} of {len(steps)}, first at step "
        f"{bad[0].step} (loss {value}); {skipped} of them were skipped. The scale is innocent."
        f"{still}{traced}",
        numbers(bad),
        (),
        f"Look {where}for a log or a division at zero, inputs that are inf or NaN, or activations "
        f"above float16's 65504{hint}.",
        "forward-nan",
    )


def half_loss(run: Run) -> Finding | None:
    """The loss came out of the model in float16, so its scale is capped."""
    notes = [
        e for e in run.events if e.what == "note" and HALF_LOSS in str(e.detail.get("text", ""))
    ]
    if not notes:
        return None
    largest = max((s.scale for s in run.steps), default=math.nan)
    used = f"; the largest scale used was {largest:g}" if run.steps else ""
    return Finding(
        "warning",
        "The loss is computed in float16",
        f"Noted {times(len(notes), 'time')}: a float16 loss has 11 significant bits, and the "
        f"scale passes through float16 on its way back, so it cannot exceed 32768{used}.",
        tuple(e.step for e in notes[:1] if e.step is not None),
        (),
        "Compute the loss in float32: loss_function(outputs.float(), targets).",
        "half-loss",
    )

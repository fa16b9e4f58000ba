"""Findings about how a run ended: an exception, a kill, nothing at all."""

from __future__ import annotations

from typing import Any

from ...journal import Run
from ..words import count
from .finding import Finding

END = "end"
_AT_THE_FLOOR = (
    "Load the last checkpoint, and record some steps with gradlift run: it names the first "
    "operation, input or parameter that is not finite."
)
_KNOWN = (  # part of a message, the kind that it shows, its title, its cure
    (
        "step() has already been called since the last update()",
        "update-missing",
        "update() is missing",
        "Call scaler.update() after scaler.step(), in every iteration.",
    ),
    (
        "No inf checks were recorded for this optimizer",
        "detached-layer",
        "The optimizer has no gradients at all",
        "Look for what keeps them away: a zero_grad() behind backward(), detach() or no_grad(), a "
        "model that was copied or replaced after the optimizer was made.",
    ),
    (
        "No inf checks were recorded",
        "update-twice",
        "update() is called without a step before it",
        "Call scaler.update() once, after scaler.step(optimizer).",
    ),
    (
        "Expected more than 1 value per channel",
        "one-sample-norm",
        "Batch normalisation is given a single sample",
        "Leave out the last, small batch: DataLoader(..., drop_last=True).",
    ),
    (
        "does not require grad",
        "no-graph",
        "backward() is called on a loss without a graph",
        "Look for no_grad(), detach(), .item() or .data between the parameters and the loss.",
    ),
    (
        "oss scale already at minimum",
        "floor",
        "The scale reached its floor",
        _AT_THE_FLOOR,
    ),
    (
        "Minimum loss scale reached",
        "floor",
        "The scale reached its floor",
        _AT_THE_FLOOR,
    ),
    (
        "out of memory",
        "out-of-memory",
        "The device's memory is full",
        "Use smaller batches and accumulate them, gradient checkpointing, or 16-bit weights.",
    ),
)


def ended(run: Run) -> dict[str, Any]:
    """How the run ended, as far as it was recorded; empty if it was not."""
    return next((e.detail for e in reversed(run.events) if e.what == END), {})


def crash(run: Run) -> Finding | None:
    """The script ended by an exception."""
    facts = ended(run)
    if facts.get("how") != "exception":
        return None
    frames = [f for f in facts.get("frames") or [] if isinstance(f, list) and len(f) == 3]
    place, _, source = frames[-1] if frames else ("", "", "")
    at = f" at {place}{f': `{source}`' if source else ''}" if place else ""
    kind, message = facts.get("type", "an exception"), str(facts.get("message", ""))
    for text, found, title, advice in _KNOWN:
        if text in message:
            shown = f"After {count(len(run.steps), 'step')}{at}. {kind}: {message.splitlines()[0]}"
            last = (run.steps[-1].step,) if run.steps else ()
            return Finding(
                "broken", title, shown[:500], last, (), advice, found, str(place), "certain"
            )
    return Finding(
        "broken",
        f"The script ended by {kind}",
        f"After {count(len(run.steps), 'step')}{at}. {kind}: {message.splitlines()[0][:300]}"
        if message
        else f"After {count(len(run.steps), 'step')}{at}.",
        (run.steps[-1].step,) if run.steps else (),
        (),
        "Mend this line; everything below describes the run until then.",
        "crash",
        str(place),
        "certain",
    )


def killed(run: Run) -> Finding | None:
    """A recorded script's journal that has no ending."""
    if run.header.get("mode") != "run" or not run.steps or ended(run):
        return None
    last = run.steps[-1]
    return Finding(
        "hint",
        "The journal has no ending",
        f"It stops after step {last.step}: the run is still going on, or its process was killed "
        "(kill -9, out of memory, a lost machine).",
        (last.step,),
        (),
        "If it is over, look at the system's log for the reason, such as a lack of memory.",
        "killed",
        "",
        "certain",
    )


def empty_run(run: Run) -> Finding | None:
    """A recorded script in which nothing was stepped."""
    facts = ended(run)
    if run.steps or not facts or facts.get("how") == "exception":
        return None
    notes = [e.detail.get("text", "") for e in run.events if e.detail.get("code") == "nothing"]
    return Finding(
        "broken",
        "No optimizer ever stepped",
        notes[0] if notes else "The script ended, and no step was recorded.",
        (),
        (),
        "Check that the training loop is entered: the data loader's length, a branch that needs "
        "a GPU, an early return.",
        "empty-run",
        "",
        "certain",
    )

"""What was looked at in a run, and what was not: the limits of "healthy"."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..journal import Run
from .findings.finding import loss_failed
from .words import count


class Coverage(NamedTuple):
    """Sentences without a full stop: "the forward pass in 15 of 300 steps".

    >>> coverage(Run()).complete
    False
    """

    looked: list[str]
    not_looked: list[str]
    complete: bool
    """Were gradients, the forward pass, weights and the order of calls all looked at?"""


def coverage(run: Run) -> Coverage:
    """What the journal shows of a run.

    >>> from gradlift.journal import Step
    >>> coverage(Run(steps=[Step(0, 8.0, 8.0, amax=2.0)])).looked
    ['the largest gradient in 1 of 1 step']
    """
    if run.header.get("mode") == "log":
        return _of_a_log(run)
    steps = count(len(run.steps), "step")
    looked, missing = [], []
    measured = sum(not math.isnan(s.amax) or s.nonfinite for s in run.steps)
    norms = sum(s.norm == s.norm or s.nonfinite for s in run.steps)
    parts = [
        (norms, "the gradients' norm") if norms > measured else (measured, "the largest gradient"),
        (len({s.step for s in run.samples}), "each parameter's gradient"),
        (len({f.step for f in run.forwards}), "the forward pass"),
        (len({w.step for w in run.weights}), "weights and their updates"),
    ]
    for n, what in parts:
        if n:
            looked.append(f"{what} in {n:,} of {steps}")
        else:
            missing.append(what)
    if run.calls:
        looked.append("the order of calls in all steps")
    else:
        missing.append("the order of calls")
    known = sum(s.loss == s.loss or loss_failed(s) for s in run.steps)
    if known < len(run.steps):
        missing.append(f"the loss of {count(len(run.steps) - known, 'step')}")
    if run.forwards:
        missing.append("data, other than after a loss or gradient that was not finite")
    complete = bool(measured and run.forwards and run.weights and run.calls)
    return Coverage(looked, missing, complete)


def _of_a_log(run: Run) -> Coverage:
    """A log has few numbers, and each format hides something."""
    header, n = run.header, len(run.steps)
    formats = header.get("formats")
    named = f" ({', '.join(map(str, formats))})" if isinstance(formats, list) and formats else ""
    looked = [f"{count(n, 'logged step')}{named}"]
    facts = [
        ("the loss", sum(s.loss == s.loss or loss_failed(s) for s in run.steps)),
        ("the scale", sum(s.scale == s.scale for s in run.steps)),
        ("the norm", sum(s.norm == s.norm for s in run.steps)),
    ]
    looked += [f"{what} in {known:,}" for what, known in facts if known]
    missing = [what for what, known in facts if not known]
    missing.append("gradients, activations and weights by name, the order of calls, data")
    cannot = header.get("cannot_know")
    about = tuple(what for what, known in facts if known)
    if isinstance(cannot, list):
        missing += [str(what) for what in cannot if not str(what).startswith(about)]
    for name, text in _COUNTED:
        found = header.get(name)
        if isinstance(found, int) and found:
            missing.append(text.format(count(found, "step")))
    return Coverage(looked, missing, False)


_COUNTED = (
    ("guessed", "the exact number of {}, worked out from the lines around them"),
    ("left_out", "{}, left out of a very long log"),
)

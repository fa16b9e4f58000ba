"""Findings that somebody's log allows: it has losses, norms, scales and skips, and no gradients."""

from __future__ import annotations

import math
from statistics import median

from ...core import Verdict
from ...journal import Run, Step
from ..words import count, power
from .finding import Finding, loss_failed, numbers, of_a_log, overflowed, per_key
from .overflow import START_CLEAN, after_the_search

ROSE = 10.0  # times the usual norm
RECENT, USUAL = 5, 30  # the last norms of a log, and those before them
FELL = 2.0**6  # an overflow now and then lowers a scale by less, and growth gives it back
FALLS = 8  # overflows
LOST_SCALE = 8.0  # times the scale before a resume: three overflows until it fits again
AFTER = 20  # steps after a resume in which that shows
KEPT = 4  # overflows that did not lower the scale: fewer cost next to nothing
_RECORD = (
    "record some steps with gradlift run, which names the first operation, input or parameter "
    "that is not finite"
)


@per_key
def nan_applied(steps: list[Step], run: Run) -> Finding | None:
    """The loss or the norm is not finite, and the log counts the step as applied."""
    bad = [s for s in steps if s.verdict is Verdict.APPLY and (loss_failed(s) or s.nonfinite)]
    if not bad or not of_a_log(run):
        return None
    last = steps.index(bad[-1])
    loss = loss_failed(bad[0])
    what, value = ("loss", bad[0].loss) if loss else ("norm of the gradients", bad[0].norm)
    after = [s for s in steps[last + 1 :] if math.isfinite(s.loss)]
    then = (
        f"At step {after[0].step} it is finite again, so the weights are: the mean that is printed "
        "has a division by zero in it, or one rank's loss."
        if after
        else "The updates that followed from it were written into the weights."
    )
    return Finding(
        "warning" if after else "broken",
        f"The {what} is not finite, and no step was skipped for it",
        f"In {count(len(bad), 'logged step')}, first at step {bad[0].step}, the {what} is "
        f"{value:g}, while the log counts these steps as applied. {then}",
        numbers(bad),
        (),
        f"Load the last checkpoint from before step {bad[0].step}; let the trainer stop at such a "
        f"loss (Megatron: --check-for-nan-in-loss-and-grad); {_RECORD}.",
        "nan-applied",
        "",
        "certain",
    )


@per_key
def norm_nonfinite(steps: list[Step], run: Run) -> Finding | None:
    """The norm of the gradients is not finite up to the end, whatever the loss says."""
    tail: list[Step] = []
    for s in reversed(steps):
        if s.verdict is not None or math.isfinite(s.norm):
            break
        tail.append(s)
    tail = [s for s in reversed(tail) if s.norm == s.norm or s.nonfinite]
    if len(tail) < 2 or not of_a_log(run) or all(map(loss_failed, tail)):
        return None
    zero = sum(s.loss == 0 for s in tail)
    filtered = (
        f" The loss is printed as 0 in {zero} of them: transformers replaces a loss that is not "
        "finite (logging_nan_inf_filter)."
        if zero
        else ""
    )
    return Finding(
        "broken",
        "The gradients are not finite from some step on",
        f"The norm is {tail[0].norm:g} at step {tail[0].step}, and is not finite in any of the "
        f"{count(len(tail), 'logged step')} from there to the end.{filtered} Weights that became "
        "NaN do that, and so does a batch after which every step is skipped.",
        numbers(tail),
        (),
        f"Load the last checkpoint from before step {tail[0].step}, and {_RECORD}. With "
        "transformers, logging_nan_inf_filter=False shows the true loss.",
        "norm-nonfinite",
        "",
        "likely",
    )


@per_key
def norm_rising(steps: list[Step], run: Run) -> Finding | None:
    """The norm of the gradients grew by a large factor before the end of the log."""
    norms = [s for s in steps if 0 < s.norm < math.inf]
    if len(norms) < USUAL + RECENT or not of_a_log(run):
        return None
    recent, usual = norms[-RECENT:], norms[-USUAL - RECENT : -RECENT]
    before, after = median(s.norm for s in usual), median(s.norm for s in recent)
    if after < ROSE * before:
        return None
    return Finding(
        "warning",
        "The norm of the gradients rises before the end",
        f"It was {before:.3g} (the median of {USUAL} logged steps), and {after:.3g} in the last "
        f"{RECENT}, up to step {recent[-1].step}.",
        numbers(recent),
        (),
        "Lower the learning rate or clip the norm, from the checkpoint before the rise on. If the "
        "loss rises as well, training diverges; if it does not, look at the data of these steps.",
        "norm-rising",
        "",
        "likely",
    )


@per_key
def scale_falls(steps: list[Step], run: Run) -> Finding | None:
    """The scale falls over the whole run: overflows come faster than it grows."""
    if not of_a_log(run):
        return None
    rest = steps[_after_the_first_fall(steps) :]
    known = [s for s in rest if s.scale == s.scale]
    bad = [s for s in known if s.next_scale < s.scale]
    if len(bad) < FALLS:
        return None
    top, last = max(known, key=lambda s: s.scale), known[-1]
    lowest = min(s.next_scale for s in bad)
    at = next(i for i, s in enumerate(known) if s.next_scale == lowest)
    recovered = any(s.next_scale > 4 * lowest for s in known[at:])
    if recovered or last.next_scale * FELL > top.scale:
        return None
    every = (bad[-1].step - bad[0].step) / (len(bad) - 1)
    return Finding(
        "warning",
        "The scale falls and does not recover",
        f"It fell from {power(top.scale)} at step {top.step} to {power(last.next_scale)} at step "
        f"{last.step}: it was lowered {len(bad)} times, once in {every:.0f} steps, which is more "
        "often than it grows.",
        numbers(bad),
        (),
        "Let it grow sooner (DeepSpeed: loss_scale_window; Megatron: --loss-scale-window) than an "
        f"overflow comes, every {every:.0f} steps. If overflows come ever faster, activations or "
        "gradients grow: lower the learning rate, or use bfloat16.",
        "scale-falls",
        "",
        "likely",
    )


def _after_the_first_fall(steps: list[Step]) -> int:
    """Where the search for a first scale is over; in a table of scales nothing says which steps
    were skipped."""
    if any(map(overflowed, steps)):
        return after_the_search(steps)
    clean = 0
    for i, s in enumerate(steps):
        clean = 0 if s.next_scale < s.scale else clean + 1
        if clean == START_CLEAN:
            return i + 1
    return len(steps)


def resume_lost_scale(run: Run) -> Finding | None:
    """After a resume the scale is far above where it was, and overflows until it fits again."""
    for event in run.events:
        before = event.detail.get("scale")
        if event.what != "resume" or not isinstance(before, float) or not before > 0:
            continue
        after = [s for s in _behind(run, event.step or 0) if s.scale == s.scale]
        lost = [s for s in after if overflowed(s)]
        if len(lost) >= 2 and after[0].scale >= LOST_SCALE * before:
            return Finding(
                "warning",
                "The scaler's state was not restored",
                f"The run was resumed at step {event.step}. The scale had been {power(before)}, "
                f"and began anew at {power(after[0].scale)}: {count(len(lost), 'step')} of the "
                f"next {len(after)} overflowed.",
                numbers(lost),
                (),
                "Save the scaler's state with the checkpoint and load it, or start from "
                f"init_scale={power(before)} (DeepSpeed: initial_scale_power).",
                "resume-without-scaler",
            )
    return None


def overflows_hidden(run: Run) -> Finding | None:
    """The log counts skipped steps, and has no line of an overflow: the log level hides them."""
    formats = run.header.get("formats") if of_a_log(run) else None
    if not isinstance(formats, list) or "deepspeed" not in formats:
        return None
    lost = [s for s in run.steps if overflowed(s)]
    counted = [s for s in lost if s.verdict is not Verdict.HALT]
    if any(s.scale == s.scale for s in lost):
        return None
    if counted:
        skips = count(len(counted), "skipped step")
        shown = f"The log counts {skips}, and has no line about any of them"
    elif lost:
        shown = "The scale reached its minimum, and the log has no overflow on the way there"
    elif run.header.get("quiet") is True:
        shown = "The log has warnings of DeepSpeed, and none of its other lines"
    else:
        return None
    return Finding(
        "hint",
        "Overflows are not printed",
        f"{shown}: since 0.17.6 DeepSpeed prints them only at the log level info. That there is no "
        "OVERFLOW line is no proof of health.",
        numbers(counted),
        (),
        'Set "log_level": "info" in DeepSpeed\'s configuration. The scale is then known, too.',
        "overflows-hidden",
        "",
        "certain" if lost else "likely",
    )


def _behind(run: Run, first: int) -> list[Step]:
    """The steps after the last time that the numbers went back to `first`."""
    at = max((i for i, s in enumerate(run.steps) if s.step == first), default=0)
    while at and run.steps[at - 1].step <= run.steps[at].step and run.steps[at].skipped:
        if run.steps[at - 1].step < first - 1:
            break
        at -= 1
    return run.steps[at : at + AFTER]


def hysteresis(run: Run) -> Finding | None:
    """Overflows that did not lower the scale, since so many are tolerated first."""
    kept = run.header.get("hysteresis", 0) if of_a_log(run) else 0
    lost = [s for s in run.steps if overflowed(s)]
    if not isinstance(kept, int) or kept < max(KEPT, 0.3 * len(lost)):
        return None
    return Finding(
        "hint",
        "Many lost steps do not lower the scale",
        f"{kept} of {count(len(lost), 'overflow')} only used up hysteresis: the scale stayed, and "
        "the next step overflowed at it again.",
        numbers([s for s in lost if s.scale == s.next_scale]),
        (),
        'Set "hysteresis": 1 if overflows come in a row, as in the search for a first scale; or '
        'start lower ("initial_scale_power"). "consecutive_hysteresis": true restores it after '
        "each clean step.",
        "hysteresis",
        "",
        "certain",
    )

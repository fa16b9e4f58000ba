"""A recorded run under another rule."""

from __future__ import annotations

import math
import os

from ..core import Cause, LossScale, Verdict
from ..formats import FP16, Format
from ..journal import Event, Run, Step, read_journal
from ..reading import Reading
from ..rules import Rule, resolve


def replay(
    run: Run | str | os.PathLike[str],
    rule: Rule | str,
    *,
    retries: int = 0,
    format: Format = FP16,
) -> Run:
    """What `rule` would have done with this run's gradients, as a run of the same kind.

    A step that was clean at scale s with largest gradient a is clean at every s' <= s; at a larger
    s' it overflows if a/s * s' leaves `format`. A step that overflowed at s overflows at every
    s' >= s. Where the recording does not show the outcome (an overflow at a larger scale, a step
    whose amax was not measured), the verdict is None, the rule is not advanced, and
    `run.undecided` counts the step. Each key of a run with several losses is replayed separately.
    Losses, norms and learning rates are those of the recording: a replay computes the scale, not
    the weights. "auto" is sharp with retries, cautious without.

    >>> recorded = Run(steps=[Step(i, 2.0**10, 2.0**10, amax=1.0) for i in range(3)])
    >>> replay(recorded, "static:2^20").skipped, replay(recorded, "static:2^30").skipped
    (0, 3)
    """
    if not isinstance(run, Run):
        run = read_journal(run)
    rule = resolve(rule, retries=retries > 0)
    scales: dict[str, LossScale] = {}
    header = {**run.header, "rule": str(rule), "replay_of": run.header.get("rule")}
    again = Run(header=header, samples=run.samples, probes=run.probes, path=run.path)
    for was in run.steps:
        if was.key not in scales:
            scales[was.key] = LossScale(rule)
        scale = scales[was.key]
        known = was.cause is not Cause.UNKNOWN_NONFINITE
        for left in range(retries, -1, -1):
            before = float(scale.state.scale)
            reading = _reading(was, before, format, rule)
            if reading is None:
                break
            decision = scale.decide(reading, loss_known=known, retries_left=left)
            if decision.verdict is not Verdict.RETRY:
                break
            scale.retry(decision)
        verdict, cause = (None, Cause.NONE) if reading is None else decision[1:3]
        if reading is not None:
            scale.finish(decision)
        after = float(scale.state.scale)
        again.steps.append(_step(was, before, after, reading, verdict, cause, retries - left))
        event = _event(again.steps[-1], was)
        if event:
            again.events.append(event)
    return again


def _reading(was: Step, scale: float, format: Format, rule: Rule) -> Reading | None:
    """What the gradients of a recorded step show at another scale; None if it is not known."""
    if was.verdict is None or not 0 < was.scale < math.inf:  # no scale: the file is damaged
        return None
    if was.cause is Cause.NO_GRADIENTS:
        return Reading(nonfinite=False, amax=was.amax, checked=False)
    if was.cause is Cause.LOSS_NONFINITE:
        return Reading(nonfinite=was.nonfinite, amax=math.inf, loss_nonfinite=True)
    if was.nonfinite:
        return Reading(nonfinite=True, amax=math.inf) if scale >= was.scale else None
    if not math.isfinite(was.amax):  # it was not measured
        if scale > was.scale or rule.magnitudes:
            return None
        return Reading(nonfinite=False, amax=math.inf)
    times = scale / was.scale
    amax, probe = was.amax * times, was.probe_amax * times
    return Reading(
        nonfinite=times > 1 and bool(format.overflows(amax) or format.overflows(probe)),
        amax=amax,
        probe_amax=probe,
        norm=was.norm,
    )


def _step(
    was: Step,
    scale: float,
    next_scale: float,
    reading: Reading | None,
    verdict: Verdict | None,
    cause: Cause,
    tries: int,
) -> Step:
    seen = reading or Reading(nonfinite=False, amax=math.nan)
    return was._replace(
        scale=scale,
        next_scale=next_scale,
        amax=seen.amax,
        nonfinite=bool(seen.nonfinite),
        verdict=verdict,
        cause=cause,
        culprits=was.culprits if seen.nonfinite and was.nonfinite else (),
        retries=tries,
        probe_amax=seen.probe_amax,
    )


def _event(step: Step, was: Step) -> Event | None:
    if step.verdict is None:
        what = "overflowed" if was.nonfinite else "has no amax"
        text = f"{what} at {was.scale:g}: the recording does not show what {step.scale:g} does"
        return Event(step.step, "note", {"code": "undecided", "text": text})
    if not step.skipped:
        return None
    detail = {"cause": step.cause.name, "scale": step.scale, "next_scale": step.next_scale}
    return Event(step.step, str(step.verdict), detail)

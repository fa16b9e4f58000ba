"""A recorded run under another rule."""

from __future__ import annotations

import math
import os

from .formats import FP16, Format
from .journal import Event, Run, Step, read_journal
from .reading import Reading
from .rules import Rule, ScaleState, parse
from .verdict import Cause, Verdict, decide


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
    s' >= s. Where the recording cannot tell (an overflow seen from a smaller scale, a step whose
    amax was not taken), the verdict is None, the rule does not see it, and `run.undecided` counts
    it. Each key of a run with several losses is replayed by itself. Losses, norms and learning
    rates are those of the recording: a replay says what happens to the scale, not how training
    would have gone on.

    >>> recorded = Run(steps=[Step(i, 2.0**10, 2.0**10, amax=1.0) for i in range(3)])
    >>> replay(recorded, "static:2^20").skipped, replay(recorded, "static:2^30").skipped
    (0, 3)
    """
    if not isinstance(run, Run):
        run = read_journal(run)
    rule = parse(rule)
    states: dict[str, ScaleState] = {}
    header = {**run.header, "rule": str(rule), "replay_of": run.header.get("rule")}
    again = Run(header=header, samples=run.samples, probes=run.probes, path=run.path)
    for was in run.steps:
        state = states.get(was.key) or rule.init()
        verdict: Verdict | None = Verdict.RETRY
        tries = -1
        while verdict is Verdict.RETRY:
            tries += 1
            scale = state.scale
            reading = _reading(was, scale, format, rule)
            if reading is None:
                verdict, cause = None, Cause.NONE
                break
            known = was.cause is not Cause.UNKNOWN_NONFINITE
            verdict, cause = decide(
                reading, state, rule, loss_known=known, retries_left=retries - tries
            )
            state = rule.advance(state, reading)
        states[was.key] = state
        again.steps.append(_step(was, scale, state.scale, reading, verdict, cause, tries))
        event = _event(again.steps[-1], was)
        if event:
            again.events.append(event)
    return again


def _reading(was: Step, scale: float, format: Format, rule: Rule) -> Reading | None:
    """What the gradients of a recorded step show at another scale; None if nobody can tell."""
    if was.verdict is None:
        return None
    if was.cause is Cause.NO_GRADIENTS:
        return Reading(nonfinite=False, amax=was.amax, checked=False)
    if was.cause is Cause.LOSS_NONFINITE:
        return Reading(nonfinite=was.nonfinite, amax=math.inf, loss_nonfinite=True)
    if was.nonfinite:
        return Reading(nonfinite=True, amax=math.inf) if scale >= was.scale else None
    if not math.isfinite(was.amax):  # it was not taken
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
        near_max_share=was.near_max_share if times == 1 else math.nan,
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
        near_max_share=seen.near_max_share,
        probe_amax=seen.probe_amax,
    )


def _event(step: Step, was: Step) -> Event | None:
    if step.verdict is None:
        what = "overflowed" if was.nonfinite else "has no amax"
        said = f"{what} at {was.scale:g}: the recording cannot tell what {step.scale:g} does"
        return Event(step.step, "note", {"text": said})
    if step.verdict is Verdict.APPLY or step.cause is Cause.NO_GRADIENTS:
        return None
    detail = {"cause": step.cause.name, "scale": step.scale, "next_scale": step.next_scale}
    return Event(step.step, str(step.verdict), detail)

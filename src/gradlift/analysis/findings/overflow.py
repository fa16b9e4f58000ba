"""Findings about overflows: a scale that oscillates, decays or starts too high; culprits."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from ...core import Cause, Verdict
from ...journal import Run, Step
from ..exponents import culprit_of
from ..words import count, power
from .finding import SHOWN, Finding, leader, numbers, of_a_log, overflowed, per_key, spanned

THRASH_CYCLES = 5  # fewer may be chance, or the search for a scale
THRASH_RATE = 1 / 50  # torch's own rule pays one step in 2,000; this is forty times as much
DECAY_SKIPS = 20  # in a row: the scale fell a million times, so it is not the cause
FLOOR_LOST = 0.1  # share of all steps that are lost at the floor: too many to train
START_SKIPS = 8  # a start 2^8 times too high; a healthy search takes a handful of steps
START_CLEAN = 5  # so many applied steps in a row end the search for a first scale
STUCK = 4  # overflows at one scale that hysteresis may explain; after more it is no search
LEADS = 5  # overflows: with fewer it may be chance which parameter leads
LEAD_SHARE = 0.8  # "nearly always the same one"
LEAD_RATE = 1 / 1000  # twice the overflows that torch's own rule provokes by raising the scale
OFTEN = 1 / 20  # a hundred times what torch's own rule costs
EXPLODED = 10.0  # times the usual norm: ordinary noise between batches stays below
RECENT, USUAL = 5, 30  # steps just before an overflow, and those before them


@per_key
def thrash(steps: list[Step], run: Run) -> Finding | None:
    """The scale is raised and overflows repeatedly, at the same value."""
    cycles: dict[float, list[int]] = {}
    for first, *_ in _tried(steps):
        cycles.setdefault(steps[first].scale, []).append(first)
    at, places = max(cycles.items(), key=lambda item: len(item[1]), default=(math.nan, []))
    if len(places) < THRASH_CYCLES:
        return None
    span = spanned(steps[places[0] : places[-1] + 1], run)
    if len(places) < THRASH_RATE * span:
        return None
    bad = [steps[i] for i in places]
    name, led = leader(bad)
    return Finding(
        "warning",
        "The scale oscillates at the same value",
        f"It was raised to {power(at)} and overflowed there {len(bad)} times in {span} steps, "
        f"each time losing a step{_led(name, led, len(bad))}.",
        numbers(bad),
        (name,) if name else (),
        f"Hold the scale at {power(at / 2)}, or let it grow less often (DeepSpeed: "
        "loss_scale_window; Megatron: --loss-scale-window; fairseq: --fp16-scale-window)."
        if of_a_log(run)
        else 'Use rule="auto", which measures how large gradients are before it raises the scale '
        f'(or hold it: rule="static:{power(at / 2)}").',
        "thrash",
    )


@per_key
def floor(steps: list[Step], run: Run) -> Finding | None:
    """Gradients stay non-finite at every scale."""
    bad = [s for s in steps if s.cause is Cause.FLOOR and s.skipped]
    tail = _last_streak(steps)
    if not bad and len(tail) < DECAY_SKIPS:
        return None
    if of_a_log(run) and tail and tail[-1].verdict is Verdict.HALT and not _scales(tail):
        return _at_the_minimum(steps, tail[-1])
    at_end = bool(tail) and (len(tail) >= DECAY_SKIPS or tail[-1].cause is Cause.FLOOR)
    broken = at_end or len(bad) > FLOOR_LOST * spanned(steps, run)
    halted = at_end and len(tail) < DECAY_SKIPS
    unknown = at_end and not halted and not _scales(tail)
    shown = tail if at_end else bad
    name, led = leader(shown)
    shown_by = (
        f"The last {count(len(tail), 'step')} of {spanned(steps, run)} were all skipped (since "
        f"step {tail[0].step}){_over(tail)}{_fell(steps, run)}"
        if at_end
        else f"{count(len(bad), 'step')} of {len(steps)} overflowed at {power(bad[0].scale)}, the "
        f"smallest scale that the rule allows (first at step {bad[0].step})"
    )
    return Finding(
        "broken" if broken else "warning",
        "Every step is skipped"
        if unknown
        else "The scale decays without end"
        if at_end and not halted
        else "The scale reached its floor",
        f"{shown_by}{_led(name, led, len(shown))}. No scale is small enough, so the scale is not "
        "the cause.",
        numbers(shown),
        (name,) if name else (),
        f"Load the last checkpoint from before step {shown[0].step}, and record some steps with "
        "gradlift run: it names the first operation, input or parameter that is not finite. A "
        "smaller minimum of the scale only delays the end."
        if of_a_log(run)
        else f"Look for inf or NaN in the backward pass of {name or 'the model'} (a sqrt, norm or "
        'division at zero); on_floor="raise" with min_scale=1 stops such a run at once.',
        "floor",
    )


@per_key
def start(steps: list[Step], run: Run) -> Finding | None:
    """Many steps are lost at the start, until the scale is low enough."""
    first, length = _search(steps)
    if len(first) < START_SKIPS:
        return None
    to = steps[length].scale if length < len(steps) else first[-1].next_scale
    if to <= 0:
        return None  # no scale at all was small enough
    if to < 1:
        return Finding(
            "warning",
            "Gradients overflow float16 even when the loss is not scaled",
            f"{len(first)} of the first {count(length, 'step')} were skipped until the scale was "
            f"{power(to)}: inside the network gradients are {1 / to:g} times larger than float16 "
            "can hold.",
            numbers(first),
            (),
            "Look for a part in which gradients grow from step to step, such as a recurrence: "
            "shorten the sequence, start from smaller or orthogonal weights, or normalise inside. "
            "Or run that part in float32.",
            "exploding",
        )
    return Finding(
        "warning",
        "The scale started too high",
        f"{len(first)} of the first {count(length, 'step')} were skipped while the scale fell from "
        f"{power(first[0].scale)} to {power(to)}.",
        numbers(first),
        (),
        f"Start from {power(to)} (DeepSpeed: initial_scale_power; Megatron: --initial-loss-scale; "
        "fairseq: --fp16-init-scale)."
        if of_a_log(run)
        else f"Start from init_scale={power(to)}, or let train_step(retries={len(first)}, ...) "
        "compute the first batch again instead of losing it.",
        "start",
    )


@per_key
def culprit(steps: list[Step], run: Run) -> Finding | None:
    """One parameter is nearly always the first culprit, at scales that had not been raised."""
    bad, headroom = _unprovoked(steps)
    if len(bad) < LEADS or len(bad) < LEAD_RATE * len(steps):
        return None
    name, led = leader(bad)
    if not name or led < LEAD_SHARE * len(bad):
        return None
    kinds = _kinds(run, name)
    alone = sum(s.culprits == (name,) for s in bad)
    return Finding(
        "warning",
        f"{name} is nearly always the first to overflow",
        f"It led {led} of {len(bad)} overflows in {len(steps)} steps{kinds}, {alone} times "
        f"alone{_room(headroom)}.",
        numbers([s for s in bad if s.culprits and s.culprits[0] == name]),
        (name,),
        f"Keep the layer of {name} in float32, and look for a sqrt, norm or division near zero in "
        "its backward pass; a lower scale for all layers would flush more gradients.",
        "culprit",
    )


@per_key
def overflows(steps: list[Step], run: Run) -> Finding | None:
    """Many steps are lost at scales that had not been raised, and not to a single parameter."""
    bad, headroom = _unprovoked(steps)
    trained = spanned(steps, run)
    if len(bad) < LEADS or len(bad) < OFTEN * trained:
        return None
    names = list(dict.fromkeys(s.culprits[0] for s in bad if s.culprits))
    who = f", first in {count(len(names), 'parameter')}" if names else ""
    return Finding(
        "warning",
        "Many steps are lost to overflow",
        f"{len(bad)} of {trained} steps overflowed ({len(bad) / trained:.0%}){who}"
        f"{_room(headroom)}.",
        numbers(bad),
        tuple(names[:SHOWN]),
        "Clip the norm or lower the learning rate. If overflows come at any scale, record some "
        "steps with gradlift run, which names the parameter that overflows."
        if of_a_log(run)
        else 'Use train_step(retries=4, model=model) with rule="auto": an overflowing batch is '
        "then computed again at a lower scale instead of being lost.",
        "overflows",
    )


@per_key
def exploding(steps: list[Step], run: Run) -> Finding | None:
    """The norm of the gradients grew by a large factor just before an overflow."""
    at: list[Step] = []
    worst, before, after = 0.0, math.nan, math.nan
    norms: list[float] = []  # of the applied steps so far, the last few
    for s in steps:
        if not s.skipped:
            if 0 < s.norm < math.inf:
                norms.append(s.norm)
                if len(norms) > 4 * USUAL:
                    del norms[: 2 * USUAL]
            continue
        if not overflowed(s) or len(norms) < USUAL:
            continue
        window = norms[-USUAL:]
        if max(window) < EXPLODED * min(window):
            continue
        usual, recent = median(window[:-RECENT]), median(window[-RECENT:])
        if recent >= EXPLODED * usual:
            at.append(s)
            if recent / usual > worst:
                worst, before, after = recent / usual, usual, recent
    if not at:
        return None
    return Finding(
        "warning",
        "The gradients explode before they overflow",
        f"Before {count(len(at), 'overflow')} (first at step {at[0].step}) the norm had grown "
        f"{worst:.0f} times within {USUAL} steps, from {before:.3g} to {after:.3g}. "
        "The overflow is a consequence.",
        numbers(at),
        (),
        "Lower the learning rate, or clip: scaler.step(optimizer, max_norm=1.0).",
        "exploding",
    )


def _fell(steps: list[Step], run: Run) -> str:
    """In a log: the overflows before, and that it is not known what overflowed."""
    if not of_a_log(run):
        return ""
    lost = [s for s in steps if overflowed(s)]
    known = _scales(lost)
    before = (
        f"; {count(len(lost), 'overflow')} in all since step {lost[0].step}, the first logged at "
        f"{power(known[0].scale)}"
        if len(known) > 1
        else ""
    )
    return f"{before}. The log does not show whether the loss was finite"


def _at_the_minimum(steps: list[Step], last: Step) -> Finding:
    """The trainer says only at its end that the scale had fallen."""
    after = f" after step {steps[-2].step}" if len(steps) > 1 else ""
    return Finding(
        "broken",
        "The scale reached its floor",
        f"The trainer ended{after}, since its scale was at the minimum. The log has no line about "
        "the overflows on the way there: it does not show when they began, nor whether the loss "
        "was finite.",
        (last.step,) if after else (),
        (),
        "Load a checkpoint from well before the end, and record some steps with gradlift run: it "
        "names the first operation, input or parameter that is not finite.",
        "floor",
    )


def _scales(steps: list[Step]) -> list[Step]:
    """Those whose scale is known."""
    return [s for s in steps if s.scale == s.scale]


def _over(tail: list[Step]) -> str:
    """From which scale to which."""
    known = _scales(tail)
    if not known:
        return ""
    return f", while the scale fell from {power(known[0].scale)} to {power(known[-1].next_scale)}"


def _led(name: str, led: int, of: int) -> str:
    return f"; {name} was the first non-finite gradient in {led} of {of}" if name else ""


def _room(headroom: list[float]) -> str:
    if not headroom:
        return ""
    return f"; just before, gradients were {median(headroom):.0f} bits below float16's maximum"


def _last_streak(steps: list[Step]) -> list[Step]:
    """The overflows at the end of the run, after the last applied step."""
    tail = []
    for s in reversed(steps):
        if overflowed(s):
            tail.append(s)
        elif s.cause is not Cause.NO_GRADIENTS:
            break
    return tail[::-1]


def _search(steps: list[Step]) -> tuple[list[Step], int]:
    """The overflows of the search for a first scale, and how many steps it took."""
    bad: list[Step] = []
    clean = length = stuck = 0
    scale, before = math.inf, steps[0].step if steps else 0
    for i, s in enumerate(steps):
        clean += max(0, s.step - before - 1)  # steps that a log does not name
        before = s.step
        if clean >= START_CLEAN or s.scale > scale:
            break
        stuck = stuck if s.scale == scale else 0
        scale, clean = s.scale, clean + 1
        if overflowed(s):
            bad.append(s)
            clean, length, stuck = 0, i + 1, stuck + 1
        if stuck > STUCK:
            return [], 0
    return bad, length


def after_the_search(steps: list[Step]) -> int:
    """The position of the first step after the search for a first scale."""
    return _search(steps)[1]


def _tried(steps: list[Step]) -> list[list[int]]:
    """For each time the scale was raised: the positions of the overflows at the new scale.

    With hysteresis it takes several until the scale is lowered again.
    """
    found: list[list[int]] = []
    scale, grown_to, fresh = math.inf, math.nan, False
    for i, s in enumerate(steps):
        if s.scale > scale:
            grown_to, fresh = s.scale, True
        scale = s.scale
        if scale == grown_to and overflowed(s):
            if fresh:
                found.append([])
                fresh = False
            found[-1].append(i)
    return found


def _unprovoked(steps: list[Step]) -> tuple[list[Step], list[float]]:
    """Overflows at a scale that had not been raised, after the start; headroom before each."""
    tried = {i for places in _tried(steps) for i in places}
    bad: list[Step] = []
    headroom: list[float] = []
    before = math.nan
    for i in range(_search(steps)[1], len(steps)):
        s = steps[i]
        if not s.skipped:
            before = s.headroom()
        elif overflowed(s) and i not in tried:
            bad.append(s)
            if before == before:
                headroom.append(before)
    return bad, headroom


def _kinds(run: Run, name: str) -> str:
    """How often its gradient was inf, how often NaN, by the events in which it was first."""
    counts: Counter[str] = Counter()
    for event in run.events:
        first = culprit_of(*(event.detail.get("culprits") or ("",))[:1])
        if first == name and first.kind:
            counts[first.kind] += 1
    return f" ({', '.join(f'{n} {kind}' for kind, n in counts.most_common())})" if counts else ""

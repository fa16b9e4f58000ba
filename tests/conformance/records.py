"""What every adapter must record, return, warn of and save: the same windows, everything compared.

Import it into a framework's folder beside `suite` and give a `Driver` fixture. To what `suite`
asks of a driver this adds

    driver = Driver(rule, journal=path, **limits)       rule is a text
    driver.window([(loss, grads), ...])                 several losses, one step
    driver.train([(loss, grads)], retries=n)            one step, with retries
    driver.half(loss, grads)                            a step whose loss is float16
    driver.result, .skipped_steps, .state_dict(), .load_state_dict(state)
    driver.close()                                      all that comes late has come
    Driver.adapter, Driver.framework                    its name in docs/adapters.md, in the journal
    Driver.more_facts                                   what else its header has

`window`, `train` and `half` return what `step` returns. What an adapter cannot know is data:
`Driver.CANNOT = {fact: reason}`, where the facts are those of `FACTS`. It is taken out of what is
expected here, and docs/adapters.md has the same rows. The expectations are written out by hand.
"""

import functools
import json
import math
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gradlift import Cause, Journal, Verdict, read_journal
from gradlift.core import HALF_LOSS
from gradlift.errors import TrainingHalted
from gradlift.journal import Recorder, Step, set_current
from gradlift.rules import resolve

from .documents import ROOT
from .reference import NumpyDriver
from .suite import HUGE, NAN, START, UNIT, same

FACTS = {
    "loss": "the loss: causes are 'unknown non-finite', and a NaN loss lowers the scale",
    "at once": "a halt and a warning come one step later",
    "lr": "the learning rate",
    "amax": "the largest gradient, where the rule does not need it",
    "all culprits": "more than the first culprit",
    "retries": "computing a batch again",
    "retry events": "an event for each retry (their number is in the step's line)",
    "half_loss": "a note that the loss was computed in float16",
    "limits": "halting after so many skips, a policy at the floor",
    "state": "the layout of saved states that adapters share",
}

NORM = math.sqrt(0.640625)  # of UNIT
BOTH = {"a": np.float32([0.5, np.nan, 0, 0]), "b": np.float32([0.25, np.inf])}
TINY = {n: np.float32(g * 2.0**-12) for n, g in UNIT.items()}
LARGE = {"a": np.float32([0.5, 0.5, 0.5, 2.0**15]), "b": np.float32([0.25, 0.5])}
RULE = "backoff:init_scale=16,growth_interval=2,min_scale=4"
LOW = "backoff:init_scale=16,min_scale=8"
CAUTIOUS = "headroom:margin_bits=2,hold_bits=4,leak=256,explore=24"


# What is expected


class Story(NamedTuple):
    rule: str
    does: list
    """Of the driver: ("step", loss, grads) and the like."""
    steps: list[Step]
    """The journal's lines; also what is returned, the result and the weights follow from them."""
    events: list[tuple]
    state: dict
    limits: dict = {}
    header: str | None = None
    """The rule in the header, if it is not the text that was given."""
    halt: str | None = None
    warned: list[str] = []
    needs: tuple[str, ...] = ()
    """A driver that cannot know one of these is not asked."""


def one(grads, loss=1.0):
    return "step", loss, grads


def window(*batches):
    return "window", list(batches)


def train(grads, retries, loss=1.0):
    return "train", [(loss, grads)], retries


def applied(scale, next_scale, amax, norm=NORM, **more):
    return Step(0, scale, next_scale, amax, norm=norm, **{"loss": 1.0, "lr": 1.0, **more})


def skipped(scale, next_scale, cause, *culprits, **more):
    given = {"nonfinite": True, "loss": 1.0, "lr": 1.0, "verdict": Verdict.SKIP, **more}
    return Step(0, scale, next_scale, cause=cause, culprits=culprits, **given)


def bad_loss(scale, amax, norm):
    """A NaN loss whose gradients are finite."""
    line = applied(scale, scale, amax, norm, loss=math.nan)
    return line._replace(verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE)


def event(step, what, cause, scale, next_scale, *culprits, micro_batch=None):
    return (
        step,
        what,
        {
            "cause": cause,
            "scale": scale,
            "next_scale": next_scale,
            "culprits": list(culprits),
            "micro_batch": micro_batch,
        },
    )


def saved(scale, steps, skipped=0, *, clean=0, skips=0, interval=2):
    return {
        "scale": scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "_growth_tracker": clean,
        "gradlift": {
            "schema": 1,
            "rule": "backoff",
            "sharp": True,
            "skips": skips,
            "left": 1,
            "level": 0,
            "spread": 0,
            "seen": 0,
            "steps": steps,
            "skipped": skipped,
        },
    }


def saved_auto(scale, steps, skipped=0, *, clean=0, skips=0, level=0, spread=0, seen=1, sharp):
    state = saved(scale, steps, skipped, clean=clean, skips=skips, interval=2000)
    state["gradlift"] |= {"rule": "headroom", "sharp": sharp, "left": 0}
    state["gradlift"] |= {"level": level, "spread": spread, "seen": seen}
    return state


HALTED = "Training was halted: "
ADVICE = (
    "Lower the learning rate or clip the gradients; if the first steps of a run overflow, start "
    "from a lower init_scale or use the rule 'auto'."
)
UNKNOWN = (
    "Print the loss: if it is NaN the forward pass is at fault, and no scale will help; else lower "
    "the learning rate or clip the gradients."
)

STORIES = {
    "clean steps, and growth": Story(
        RULE,
        [one(UNIT), one(UNIT), one(UNIT)],
        [applied(16, 16, 8), applied(16, 32, 8), applied(32, 32, 16)],
        [],
        saved(32.0, 3, clean=1),
    ),
    "overflow": Story(
        RULE,
        [one(UNIT), one(HUGE), one(UNIT)],
        [applied(16, 16, 8), skipped(16, 8, Cause.OVERFLOW, "a"), applied(8, 8, 4)],
        [event(1, "skip", "OVERFLOW", 16, 8, "a (inf)")],
        saved(8.0, 3, 1, clean=1),
    ),
    "NaN gradients": Story(
        RULE,
        [one(NAN), one(UNIT)],
        [skipped(16, 8, Cause.OVERFLOW, "a"), applied(8, 8, 4)],
        [event(0, "skip", "OVERFLOW", 16, 8, "a (nan)")],
        saved(8.0, 2, 1, clean=1),
    ),
    "two culprits": Story(
        RULE,
        [one(BOTH)],
        [skipped(16, 8, Cause.OVERFLOW, "b", "a")],
        [event(0, "skip", "OVERFLOW", 16, 8, "b (inf)", "a (nan)")],
        saved(8.0, 1, 1, skips=1),
    ),
    "non-finite losses": Story(
        RULE,
        [one(NAN, math.nan), one(NAN, math.inf), one(NAN, -math.inf), one(UNIT, math.nan)],
        [
            skipped(16, 16, Cause.LOSS_NONFINITE, "a", loss=math.nan),
            skipped(16, 16, Cause.LOSS_NONFINITE, "a", loss=math.inf),
            skipped(16, 16, Cause.LOSS_NONFINITE, "a", loss=-math.inf),
            bad_loss(16, 8, NORM),
        ],
        [
            *(event(i, "skip", "LOSS_NONFINITE", 16, 16, "a (nan)") for i in range(3)),
            event(3, "skip", "LOSS_NONFINITE", 16, 16),
        ],
        saved(16.0, 4, 4, skips=4),
        needs=("loss",),
    ),
    "no gradients": Story(
        RULE,
        [one(UNIT), one({}), one(UNIT)],
        [
            applied(16, 16, 8),
            skipped(16, 16, Cause.NO_GRADIENTS, nonfinite=False),
            applied(16, 32, 8),
        ],
        [],
        saved(32.0, 3),
    ),
    "no gradients after an overflow": Story(
        RULE,
        [one(HUGE), one({}), one(UNIT)],
        [
            skipped(16, 8, Cause.OVERFLOW, "a"),
            skipped(8, 8, Cause.NO_GRADIENTS, nonfinite=False),
            applied(8, 8, 4),
        ],
        [event(0, "skip", "OVERFLOW", 16, 8, "a (inf)")],
        saved(8.0, 3, 1, clean=1),
    ),
    "a static scale": Story(
        "static:16",
        [one(HUGE), one(UNIT)],
        [skipped(16, 16, Cause.OVERFLOW, "a"), applied(16, 16, 8)],
        [event(0, "skip", "OVERFLOW", 16, 16, "a (inf)")],
        {
            **saved(16.0, 2, 1, interval=2000),
            "gradlift": {**saved(16.0, 2, 1)["gradlift"], "rule": "static", "left": 0},
        },
    ),
    "the floor holds": Story(
        LOW,
        [one(NAN), one(NAN), one(NAN), one(UNIT)],
        [
            skipped(16, 8, Cause.OVERFLOW, "a"),
            skipped(8, 8, Cause.FLOOR, "a"),
            skipped(8, 8, Cause.FLOOR, "a"),
            applied(8, 8, 4),
        ],
        [
            event(0, "skip", "OVERFLOW", 16, 8, "a (nan)"),
            event(1, "skip", "FLOOR", 8, 8, "a (nan)"),
            event(2, "skip", "FLOOR", 8, 8, "a (nan)"),
        ],
        saved(8.0, 4, 3, clean=1, interval=2000),
    ),
    "a warning at the floor": Story(
        LOW,
        [one(NAN), one(NAN), one(UNIT)],
        [
            skipped(16, 8, Cause.OVERFLOW, "a"),
            skipped(8, 8, Cause.FLOOR, "a"),
            applied(8, 8, 4),
        ],
        [
            event(0, "skip", "OVERFLOW", 16, 8, "a (nan)"),
            event(1, "skip", "FLOOR", 8, 8, "a (nan)"),
        ],
        saved(8.0, 3, 2, clean=1, interval=2000),
        limits={"on_floor": "warn"},
        warned=[
            "non-finite gradients at the smallest scale, 2^3: the step was skipped and the scale "
            "held. First non-finite gradient: a"
        ],
    ),
    "a halt at the floor": Story(
        LOW,
        [one(NAN), one(NAN)],
        [
            skipped(16, 8, Cause.OVERFLOW, "a"),
            skipped(8, 8, Cause.FLOOR, "a", verdict=Verdict.HALT),
        ],
        [
            event(0, "skip", "OVERFLOW", 16, 8, "a (nan)"),
            event(1, "halt", "FLOOR", 8, 8, "a (nan)"),
        ],
        saved(8.0, 2, 2, skips=2, interval=2000),
        limits={"on_floor": "raise"},
        halt=HALTED + "2 steps in a row were skipped, since step 0. The cause of the last one: "
        f"floor, at scale 2^3 with the rule '{LOW}'. First non-finite gradient: a. The scale is as "
        "low as it may go and gradients are still not finite, so this is hardly a matter of scale: "
        "look for inf or NaN in the backward pass, lower the learning rate, clip the gradients, or "
        "keep the named layer in float32.",
    ),
    "a halt after too many skips": Story(
        RULE,
        [one(UNIT), one(HUGE), one(HUGE)],
        [
            applied(16, 16, 8),
            skipped(16, 8, Cause.OVERFLOW, "a"),
            skipped(8, 4, Cause.OVERFLOW, "a", verdict=Verdict.HALT),
        ],
        [
            event(1, "skip", "OVERFLOW", 16, 8, "a (inf)"),
            event(2, "halt", "OVERFLOW", 8, 4, "a (inf)"),
        ],
        saved(4.0, 3, 2, skips=2),
        limits={"max_consecutive_skips": 1},
        halt=HALTED + "2 steps in a row were skipped, since step 1. The cause of the last one: "
        f"overflow, at scale 2^3 with the rule '{RULE}'. First non-finite gradient: a. {ADVICE}",
    ),
    "a halt after non-finite losses": Story(
        RULE,
        [one(UNIT, math.nan), one(UNIT, math.nan)],
        [
            bad_loss(16, 8, NORM),
            bad_loss(16, 8, NORM)._replace(verdict=Verdict.HALT),
        ],
        [
            event(0, "skip", "LOSS_NONFINITE", 16, 16),
            event(1, "halt", "LOSS_NONFINITE", 16, 16),
        ],
        saved(16.0, 2, 2, skips=2),
        limits={"max_consecutive_skips": 1},
        needs=("loss",),
        halt=HALTED + "2 steps in a row were skipped, since step 0. The cause of the last one: "
        f"loss non-finite, at scale 2^4 with the rule '{RULE}'. The loss was not finite before it "
        "was scaled, so the scale was kept: look for inf or NaN in the inputs, a log or a division "
        "in the loss, or activations that leave float16's range in the forward pass.",
    ),
    "two losses": Story(
        RULE,
        [window((1.0, UNIT), (2.0, UNIT))],
        [applied(16, 16, 16, 2 * NORM, loss=3.0)],
        [],
        saved(16.0, 1, clean=1),
    ),
    "two losses, one overflows": Story(
        RULE,
        [window((1.0, UNIT), (2.0, HUGE))],
        [skipped(16, 8, Cause.OVERFLOW, "a", loss=3.0)],
        [event(0, "skip", "OVERFLOW", 16, 8, "a (inf)")],
        saved(8.0, 1, 1, skips=1),
    ),
    "two losses, one is NaN, and the gradients show it": Story(
        RULE,
        [window((1.0, UNIT), (math.nan, NAN)), window((math.nan, NAN), (1.0, UNIT))],
        [skipped(16, 16, Cause.LOSS_NONFINITE, "a", loss=math.nan)] * 2,
        [
            event(0, "skip", "LOSS_NONFINITE", 16, 16, "a (nan)", micro_batch=1),
            event(1, "skip", "LOSS_NONFINITE", 16, 16, "a (nan)", micro_batch=0),
        ],
        saved(16.0, 2, 2, skips=2),
        needs=("loss",),
    ),
    "two losses, one is NaN, and the gradients are finite": Story(
        RULE,
        [window((1.0, UNIT), (math.nan, UNIT))],
        [applied(16, 16, 16, 2 * NORM, loss=math.nan)],
        [],
        saved(16.0, 1, clean=1),
        needs=("loss",),
    ),
    "two losses, both NaN, and the gradients are finite": Story(
        RULE,
        [window((math.nan, UNIT), (math.nan, UNIT))],
        [bad_loss(16, 16, 2 * NORM)],
        [event(0, "skip", "LOSS_NONFINITE", 16, 16, micro_batch=0)],
        saved(16.0, 1, 1, skips=1),
        needs=("loss",),
    ),
    "retries": Story(
        RULE,
        [train(UNIT, 2), train(HUGE, 1)],
        [applied(16, 16, 8), skipped(8, 4, Cause.OVERFLOW, "a", retries=1)],
        [
            event(1, "retry", "OVERFLOW", 16, 8, "a (inf)"),
            event(1, "skip", "OVERFLOW", 8, 4, "a (inf)"),
        ],
        saved(4.0, 2, 1, skips=1),
        needs=("retries",),
    ),
    "auto, where nothing is retried": Story(
        "auto",
        [one(UNIT), one(HUGE), one(UNIT)],
        [
            applied(2.0**16, 2.0**14, 2.0**15),
            skipped(2.0**14, 2.0**12, Cause.OVERFLOW, "a"),
            applied(2.0**12, 2.0**13, 2.0**11),
        ],
        [event(1, "skip", "OVERFLOW", 2.0**14, 2.0**12, "a (inf)")],
        saved_auto(2.0**13, 3, 1, level=-65536, spread=261888, sharp=False),
        header=CAUTIOUS,
    ),
    "auto, where batches are retried": Story(
        "auto",
        [train(LARGE, 2), train(UNIT, 2)],
        [
            applied(2.0**-8, 2.0**-1, 2.0**7, 2.0**15, retries=2),
            applied(2.0**-1, 2.0**2, 2.0**-2),
        ],
        [
            event(0, "retry", "OVERFLOW", 2.0**16, 2.0**8, "a (inf)"),
            event(0, "retry", "OVERFLOW", 2.0**8, 2.0**-8, "a (inf)"),
        ],
        saved_auto(2.0**2, 2, level=751616, spread=65440, sharp=True),
        header="headroom",
        needs=("retries",),
    ),
    "auto, and the first batch shows that a far larger scale fits": Story(
        "auto:init_scale=1",
        [train(TINY, 2)],
        [applied(2.0**27, 2.0**27, 2.0**14, NORM * 2.0**-12, retries=1)],
        [event(0, "retry", "CALIBRATION", 1, 2.0**27)],
        saved_auto(2.0**27, 1, level=-851968, spread=65440, sharp=True),
        header="headroom:init_scale=1",
        needs=("retries",),
    ),
    "auto:sharp, where nothing is retried": Story(
        "auto:sharp",
        [one(UNIT)],
        [applied(2.0**16, 2.0**15, 2.0**15)],
        [],
        saved_auto(2.0**15, 1, level=-65536, spread=65536, sharp=True),
        header="headroom",
    ),
    "a float16 loss": Story(
        "backoff:init_scale=2^17",
        [("half", 1.0, UNIT), ("half", 1.0, UNIT)],
        [applied(2.0**15, 2.0**15, 2.0**14)] * 2,
        [(0, "note", {"code": "half-loss", "text": str(HALF_LOSS)})],
        saved(2.0**15, 2, clean=2, interval=2000),
        needs=("half_loss",),
    ),
}


# What an adapter does


class Outcome(NamedTuple):
    returned: list
    halt: str | None
    halted_at: int | None
    warned: list
    run: object
    driver: object
    state: dict | None


@functools.cache
def outcome(Driver, name, around=False):
    """One run of a story, shared by the tests below; `around`: it is recorded as `gradlift.record`
    does, and the adapter has no journal of its own."""
    path = Path(tempfile.mkdtemp()) / "run.jsonl"
    if not around:
        return told(Driver, STORIES[name], path, journal=str(path))
    with Journal(path) as journal:
        set_current(Recorder(journal))
        try:
            return told(Driver, STORIES[name], path)
        finally:
            set_current(None)


def told(Driver, story, path, **own):
    driver = Driver(story.rule, **own, **story.limits)
    returned, halt, at = [], None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for what, *given in story.does:
                stepped, cause, scale, params = getattr(driver, what)(*given)
                kept = {n: np.array(p, copy=True) for n, p in params.items()}
                returned.append((stepped, cause, scale, kept))
        except TrainingHalted as error:
            halt, at = str(error), len(returned)
        try:
            driver.close()
        except TrainingHalted as error:
            halt, at = str(error), len(returned)
    state = None if "state" in Driver.CANNOT else json.loads(json.dumps(driver.state_dict()))
    floor = [w for w in caught if "smallest scale" in str(w.message)]
    return Outcome(returned, halt, at, floor, read_journal(path), driver, state)


def asked(Driver, name):
    """The story and what came of it; skipped if the adapter cannot know what it is about."""
    story = STORIES[name]
    needs = (*story.needs, *(["limits"] if story.limits else []))
    for fact in needs:
        if fact in Driver.CANNOT:
            pytest.skip(f"{Driver.adapter}: {fact}: {Driver.CANNOT[fact]}")
    return story, outcome(Driver, name)


def cause_for(Driver, cause):
    unseen = "loss" in Driver.CANNOT and cause is Cause.OVERFLOW
    return Cause.UNKNOWN_NONFINITE if unseen else cause


def step_for(Driver, i, step, rule):
    """A line as this adapter can write it."""
    step = step._replace(step=i, cause=cause_for(Driver, step.cause))
    if "amax" in Driver.CANNOT and not resolve(rule, retries=False).magnitudes:
        step = step._replace(amax=math.nan)
    if "all culprits" in Driver.CANNOT:
        step = step._replace(culprits=step.culprits[:1])
    if "loss" in Driver.CANNOT:
        step = step._replace(loss=math.nan)
    if "lr" in Driver.CANNOT:
        step = step._replace(lr=math.nan)
    return step


def events_for(Driver, events):
    for step, what, detail in events:
        if what == "retry" and "retry events" in Driver.CANNOT:
            continue
        if what == "note":
            yield step, what, detail
            continue
        cause = cause_for(Driver, Cause[detail["cause"]]).name
        culprits = detail["culprits"]
        if "all culprits" in Driver.CANNOT:
            culprits = culprits[:1]
        changed = {"cause": cause, "culprits": culprits}
        yield step, what, {**detail, **changed}


def text_for(Driver, text):
    if "loss" in Driver.CANNOT:
        text = text.replace("one: overflow", "one: unknown non-finite").replace(ADVICE, UNKNOWN)
    return text


def alike(value, wanted):
    """Equal; floats to 1e-6, since norms are sums of float32 in some frameworks."""
    if isinstance(wanted, float):
        return value == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    return value == wanted


def with_each(test):
    return pytest.mark.parametrize("name", STORIES)(test)


# The journal


@with_each
def test_the_header(Driver, name):
    story, done = asked(Driver, name)
    header = done.run.header
    wanted = {
        "schema": 1,
        "rule": story.header or story.rule,
        "framework": Driver.framework,
        "formats": ["fp16"],
        "parameters": {"a": 4, "b": 2},
    }
    assert {key: header.get(key) for key in wanted} == wanted
    more = getattr(Driver, "more_facts", set())
    assert {*header} - {*wanted} == {"kind", "time", "versions", *more}


@with_each
def test_the_lines_of_the_steps(Driver, name):
    story, done = asked(Driver, name)
    wanted = [step_for(Driver, i, step, story.rule) for i, step in enumerate(story.steps)]
    assert [s.step for s in done.run.steps] == [s.step for s in wanted]
    for found, step in zip(done.run.steps, wanted, strict=True):
        assert 0 <= found.seconds < 60
        differing = {
            field: (getattr(found, field), getattr(step, field))
            for field in Step._fields
            if field != "seconds" and not alike(getattr(found, field), getattr(step, field))
        }
        assert differing == {}, f"step {step.step}: what was written, what was expected"


@with_each
def test_the_events(Driver, name):
    story, done = asked(Driver, name)
    found = [(e.step, e.what, e.detail) for e in done.run.events]
    assert found == list(events_for(Driver, story.events))
    assert done.run.samples == done.run.probes == []


RECORDED_AROUND = (
    "two culprits",
    "a halt after too many skips",
    "retries",
    "auto, where nothing is retried",
    "a float16 loss",
)


@pytest.mark.parametrize("name", RECORDED_AROUND)
def test_a_run_around_gets_what_a_journal_gets(Driver, name):
    """And no count, no saved scale and no halt depends on which of them there is."""
    own, around = asked(Driver, name)[1], outcome(Driver, name, around=True)
    assert plain_lines(around.run) == plain_lines(own.run)
    assert (around.halt, around.halted_at) == (own.halt, own.halted_at)
    assert around.driver.skipped_steps == own.driver.skipped_steps
    if own.state is not None:
        assert shared(around.state) == shared(own.state)


def plain_lines(run):
    """Header, steps and events without times, in a form in which NaN equals NaN."""
    header = {**run.header, "time": None}
    return repr([header, [s._replace(seconds=0.0) for s in run.steps], run.events])


# What the caller gets


@with_each
def test_what_is_returned(Driver, name):
    """Whether a step was applied, why not, the next scale, and the weights to the bit."""
    story, done = asked(Driver, name)
    weights = START
    for found, step, (what, *given) in zip(done.returned, story.steps, story.does):
        stepped, cause, scale, params = found
        assert stepped == (step.verdict is Verdict.APPLY)
        assert (cause, scale) == (cause_for(Driver, step.cause), step.next_scale)
        if stepped:
            batches = [tuple(given)] if what in ("step", "half") else given[0]
            for _, grads in batches:
                weights = {n: weights[n] - grads[n] for n in weights}
        assert same(params, weights)


@with_each
def test_the_result(Driver, name):
    story, done = asked(Driver, name)
    result, last = done.driver.result, step_for(Driver, 0, story.steps[-1], story.rule)
    told = [e for e in events_for(Driver, story.events) if e[1] != "note"]
    event = told[-1][2] if told and told[-1][0] == len(story.steps) - 1 else {}
    notes = [d["text"] for _, what, d in story.events if what == "note"]
    assert (result.verdict, result.cause) == (last.verdict, last.cause)
    assert (result.scale, result.retries) == (last.scale, last.retries)
    assert alike(result.grad_norm, last.norm)
    skipped = last.skipped
    described = [getattr(c, "described", c) for c in result.culprits]
    assert described == (event["culprits"] if skipped else [])
    assert tuple(result.culprits) == last.culprits
    assert result.micro_batch == (event["micro_batch"] if skipped else None)
    assert list(result.notes) == notes
    assert result.skipped == skipped


@with_each
def test_skipped_steps(Driver, name):
    story, done = asked(Driver, name)
    skipped = sum(s.skipped for s in story.steps)
    assert done.run.skipped == skipped
    assert done.driver.skipped_steps == skipped


@with_each
def test_halts(Driver, name):
    story, done = asked(Driver, name)
    if story.halt is None:
        assert done.halt is None
        return
    assert done.halt == text_for(Driver, story.halt)
    last = len(story.steps) - 1
    assert done.halted_at == last + ("at once" in Driver.CANNOT)


@with_each
def test_warnings_at_the_floor(Driver, name):
    """Their text, and that they point at the line that called the adapter."""
    story, done = asked(Driver, name)
    assert [str(w.message) for w in done.warned] == [text_for(Driver, w) for w in story.warned]
    files = {sys.modules[kind.__module__].__file__ for kind in Driver.__mro__[:-1]}
    assert {w.filename for w in done.warned} <= files


# The saved state


def shared(state):
    """What all adapters save alike: torch has two entries more."""
    own = {k: v for k, v in state["gradlift"].items() if k not in ("keys", "events")}
    return {**state, "gradlift": own}


@with_each
def test_the_saved_state(Driver, name):
    story, done = asked(Driver, name)
    if done.state is None:
        pytest.skip(f"{Driver.adapter}: {Driver.CANNOT['state']}")
    assert shared(done.state) == shared(story.state)


@with_each
def test_a_saved_state_goes_on_in_another_adapter(Driver, name):
    """This adapter's state in NumPy's, NumPy's in this one: the next three steps are the same."""
    story, done = asked(Driver, name)
    if done.state is None:
        pytest.skip(f"{Driver.adapter}: {Driver.CANNOT['state']}")
    reference, again, other = NumpyDriver(story.rule), Driver(story.rule), Driver(story.rule)
    drivers = (reference, again, other)
    reference.load_state_dict(done.state)
    again.load_state_dict(done.state)
    other.load_state_dict(json.loads(json.dumps(reference.state_dict())))
    for driver in drivers:
        assert shared(driver.state_dict()) == shared(story.state)
    for loss, grads in ((1.0, UNIT), (1.0, HUGE), (1.0, UNIT)):
        stepped, cause, scale, _ = reference.step(loss, grads)
        wanted = stepped, cause_for(Driver, cause), scale
        assert again.step(loss, grads)[:3] == wanted
        assert other.step(loss, grads)[:3] == wanted
    for driver in drivers:
        driver.close()
    assert len({json.dumps(shared(d.state_dict()), sort_keys=True) for d in drivers}) == 1


# What an adapter cannot know


def test_what_it_cannot_know_is_declared(Driver):
    assert {*Driver.CANNOT} <= {*FACTS}
    for fact, method in (("retries", "train"), ("half_loss", "half")):
        assert (getattr(Driver, method, None) is None) == (fact in Driver.CANNOT), fact
    assert getattr(Driver, "sees_loss", True) != ("loss" in Driver.CANNOT)
    assert bool(getattr(Driver, "late", 0)) == ("at once" in Driver.CANNOT)


def test_what_it_cannot_know_is_in_the_documents(Driver):
    page = (ROOT / "docs" / "adapters.md").read_text()
    found = re.findall(rf"^\| {re.escape(Driver.adapter)} \| (.*) \| (.*) \|$", page, re.M)
    wanted = sorted((fact, reason) for fact, reason in Driver.CANNOT.items())
    rows = "\n".join(f"| {Driver.adapter} | {fact} | {reason} |" for fact, reason in wanted)
    assert sorted(found) == wanted, f"docs/adapters.md should have\n{rows}"
    listed = dict(re.findall(r"^\| ([a-z_ ]+) \| ([^|]*) \|$", page, re.M))
    assert {fact: listed.get(fact) for fact in FACTS} == FACTS
    assert {fact for fact in FACTS if re.search(rf"^\| .* \| {fact} \| ", page, re.M)} == {*FACTS}

"""The policy: what is done with a step, and what the user is told."""

import math

import pytest

from gradlift import Cause, Reading, StepResult, Verdict, rules
from gradlift.core import Limits, decide, explain_halt
from gradlift.errors import SettingsError

CLEAN = Reading(nonfinite=False, amax=1.0)
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
DEAD_LOSS = Reading(nonfinite=True, amax=math.inf, loss_nonfinite=True)
NOTHING = Reading(nonfinite=False, amax=0.0, checked=False)
RULE = rules.Backoff(init_scale=8, min_scale=4)
START = RULE.init()
AT_FLOOR = START._replace(scale=4.0)

APPLY, SKIP, RETRY, HALT = Verdict.APPLY, Verdict.SKIP, Verdict.RETRY, Verdict.HALT


@pytest.mark.parametrize(
    ("reading", "state", "more", "expected"),
    [
        (CLEAN, START, {}, (APPLY, Cause.NONE)),
        (OVERFLOW, START, {}, (SKIP, Cause.OVERFLOW)),
        (OVERFLOW, START, {"loss_known": False}, (SKIP, Cause.UNKNOWN_NONFINITE)),
        (DEAD_LOSS, START, {}, (SKIP, Cause.LOSS_NONFINITE)),
        (CLEAN._replace(loss_nonfinite=True), START, {}, (SKIP, Cause.LOSS_NONFINITE)),
        (NOTHING, START, {}, (SKIP, Cause.NO_GRADIENTS)),
        (OVERFLOW, AT_FLOOR, {}, (SKIP, Cause.FLOOR)),
        (OVERFLOW, START, {"retries_left": 1}, (RETRY, Cause.OVERFLOW)),
        (DEAD_LOSS, START, {"retries_left": 1}, (SKIP, Cause.LOSS_NONFINITE)),
        (OVERFLOW, AT_FLOOR, {"retries_left": 1}, (SKIP, Cause.FLOOR)),
        (CLEAN, START, {"retries_left": 1}, (APPLY, Cause.NONE)),
    ],
)
def test_decide(reading, state, more, expected):
    assert decide(reading, state, RULE, **more) == expected


def test_floor_policies():
    raising, warning = Limits(on_floor="raise"), Limits(on_floor="warn")
    assert decide(OVERFLOW, AT_FLOOR, RULE, raising) == (HALT, Cause.FLOOR)
    assert decide(OVERFLOW, AT_FLOOR, RULE, warning) == (SKIP, Cause.FLOOR)
    assert decide(OVERFLOW, START, RULE, raising) == (SKIP, Cause.OVERFLOW)


def test_hysteresis_is_no_floor_yet():
    rule = rules.preset("deepspeed", init_scale=1)
    assert decide(OVERFLOW, rule.init(), rule)[1] is Cause.OVERFLOW
    spent = rule.advance(rule.init(), OVERFLOW)
    assert decide(OVERFLOW, spent, rule)[1] is Cause.FLOOR


def test_no_retry_where_the_scale_stays():
    rule = rules.preset("megatron")  # the first overflow only spends hysteresis
    assert decide(OVERFLOW, rule.init(), rule, retries_left=3)[0] is SKIP
    assert decide(OVERFLOW, rules.Static(8).init(), rules.Static(8), retries_left=3)[0] is SKIP


def test_a_static_scale_has_no_floor():
    rule = rules.Static(8)
    assert decide(OVERFLOW, rule.init(), rule, Limits(on_floor="raise"))[1] is Cause.OVERFLOW


@pytest.mark.parametrize("reading", [OVERFLOW, DEAD_LOSS])
def test_so_many_skips_are_tolerated_and_no_more(reading):
    limits = Limits(max_consecutive_skips=3)
    state, verdicts = START, []
    for _ in range(4):
        verdicts.append(decide(reading, state, RULE, limits)[0])
        state = RULE.advance(state, reading)
    assert verdicts == [SKIP, SKIP, SKIP, HALT]


def test_off_applies_everything():
    assert decide(DEAD_LOSS, rules.Off().init(), rules.Off()) == (APPLY, Cause.NONE)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3"])
def test_bad_limits(limit):
    with pytest.raises(SettingsError, match="max_consecutive_skips is"):
        Limits(max_consecutive_skips=limit)


@pytest.mark.parametrize(
    "cause", [Cause.OVERFLOW, Cause.LOSS_NONFINITE, Cause.UNKNOWN_NONFINITE, Cause.FLOOR]
)
def test_a_halt_says_how_many_since_when_why_where_and_what_to_do(cause):
    state = START._replace(skips=9)
    said = explain_halt(cause, state, RULE, step=41, culprits=("body.2.weight", "body.1.weight"))
    for part in ("10 steps in a row", "since step 32", str(cause), "2^3", "body.2.weight"):
        assert part in said
    assert "\n" not in said
    advice = said.split("body.2.weight.")[1]
    assert len(advice) > 60


def test_result_reads_well():
    assert str(StepResult(APPLY, Cause.NONE, 8.0, grad_norm=0.5)) == "apply at scale 2^3, norm 0.5"
    assert StepResult(APPLY, Cause.NONE, 8.0).stepped
    assert not StepResult(SKIP, Cause.FLOOR, 8.0).stepped
    said = str(StepResult(SKIP, Cause.UNKNOWN_NONFINITE, 8.0, retries=2))
    assert said == "skip (unknown non-finite) at scale 2^3, 2 retries"


def test_the_first_batch_is_tried_again_where_a_far_larger_scale_fits():
    rule = rules.parse("auto:init_scale=1")
    start, tiny = rule.init(), Reading(nonfinite=False, amax=2.0**-20)
    assert decide(tiny, start, rule) == (Verdict.APPLY, Cause.NONE)
    assert decide(tiny, start, rule, retries_left=2) == (Verdict.RETRY, Cause.CALIBRATION)
    assert decide(tiny, start, rule, retries_left=1) == (Verdict.APPLY, Cause.NONE)  # no way back
    bad_loss = tiny._replace(loss_nonfinite=True)
    assert decide(bad_loss, start, rule, retries_left=2) == (Verdict.SKIP, Cause.LOSS_NONFINITE)
    known = rule.advance(start, tiny)
    assert decide(tiny, known, rule, retries_left=2) == (Verdict.APPLY, Cause.NONE)
    near = Reading(nonfinite=False, amax=65504 / 2.0**4)
    assert decide(near, start, rule, retries_left=2) == (Verdict.APPLY, Cause.NONE)
    classic = rules.parse("dynamic")  # learns nothing from a magnitude
    assert decide(tiny, classic.init(), classic, retries_left=2) == (Verdict.APPLY, Cause.NONE)

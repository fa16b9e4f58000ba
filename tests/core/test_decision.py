"""core/decision.py: the parts of a decision, one by one. Whole decisions are in test_verdict.py."""

import math

import numpy as np
import pytest

from gradlift import Cause, Reading, Verdict, rules
from gradlift.core import Limits
from gradlift.core.decision import (
    carried,
    checked_max_norm,
    clip_coefficient,
    is_skip,
    loss_blamed,
    loss_level,
    moved,
    next_try,
    verdict_of,
    worth_retrying,
)
from gradlift.errors import SettingsError
from gradlift.rules import ScaleState

CLEAN = Reading(nonfinite=False, amax=1.0)
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
BAD_LOSS = OVERFLOW._replace(loss_nonfinite=True)
SKIP, HALT, APPLY = Verdict.SKIP, Verdict.HALT, Verdict.APPLY


# Clipping


def test_the_clip_coefficient_is_torchs_to_the_bit():
    """torch: f32(f32(1 / f32(f32(norm) + f32(1e-6))) * f32(max_norm)), at most 1."""
    rng = np.random.default_rng(0)
    norms = np.float32(2.0 ** rng.uniform(-40, 40, 100_000))
    limits = np.float32(2.0 ** rng.uniform(-20, 20, 100_000))
    inverse = np.float32(1) / (norms + np.float32(1e-6))
    wanted = np.minimum(inverse * limits, np.float32(1))
    assert wanted.dtype == np.float32
    found = [clip_coefficient(*pair) for pair in zip(norms.tolist(), limits.tolist())]
    assert (np.float64(found) == wanted).all()
    quotient = np.minimum(limits / (norms + np.float32(1e-6)), np.float32(1))
    assert (quotient != wanted).sum() > 1000  # so a plain division is not the same
    for norm, limit, coefficient in zip(norms[:1000], limits[:1000].tolist(), wanted):
        traced = clip_coefficient(np.asarray(norm), limit, np)
        assert (traced.dtype, traced) == (np.float32, coefficient)


def test_the_clip_coefficient_at_the_ends():
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(math.inf, 1.0) == 0.0
    assert clip_coefficient(1e39, 1.0) == 0.0  # beyond float32
    assert math.isnan(clip_coefficient(math.nan, 1.0))


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, True, False])
def test_a_max_norm_that_cannot_clip_is_refused(bad):
    with pytest.raises(SettingsError, match=r"max_norm is .*, expected a number above 0"):
        checked_max_norm(bad)


def test_a_max_norm_is_a_float():
    found = checked_max_norm(2), checked_max_norm(math.inf)
    assert found == (2.0, math.inf)
    assert type(found[0]) is float


# Losses


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ([], 0),
        ([False], 0),
        ([False, False], 0),
        ([True], 2),
        ([True, True], 2),
        ([True, False], 1),
        ([False, False, True], 1),
    ],
)
def test_loss_level(flags, level):
    assert loss_level(flags) == level


@pytest.mark.parametrize(
    ("level", "nonfinite", "blamed"),
    [
        (0, False, False),
        (0, True, False),
        (1, False, False),
        (1, True, True),
        (2, False, True),
        (2, True, True),
    ],
)
def test_loss_blamed(level, nonfinite, blamed):
    assert loss_blamed(level, nonfinite) is blamed
    traced = loss_blamed(np.asarray(level, "int32"), np.asarray(nonfinite))
    assert (traced.dtype, bool(traced)) == (bool, blamed)


def test_ranks_combine_their_levels_by_the_maximum():
    assert loss_blamed(max(loss_level([False]), loss_level([True])), False)
    assert not loss_blamed(max(loss_level([False]), loss_level([True, False])), False)


def test_what_a_float16_loss_carries():
    scales = (2.0**14, 2.0**15, 2.0**16)
    assert [carried(s, True) for s in scales] == [2.0**14, 2.0**15, 2.0**15]
    assert [carried(s, False) for s in scales] == list(scales)


# Verdicts


@pytest.mark.parametrize(
    ("cause", "skips", "limits", "verdict"),
    [
        (Cause.NONE, 9, Limits(max_consecutive_skips=1), APPLY),
        (Cause.NO_GRADIENTS, 9, Limits(1, "raise"), SKIP),
        (Cause.OVERFLOW, 9, Limits(), SKIP),
        (Cause.OVERFLOW, 1, Limits(max_consecutive_skips=2), SKIP),
        (Cause.OVERFLOW, 2, Limits(max_consecutive_skips=2), HALT),
        (Cause.LOSS_NONFINITE, 2, Limits(max_consecutive_skips=2), HALT),
        (Cause.UNKNOWN_NONFINITE, 2, Limits(max_consecutive_skips=2), HALT),
        (Cause.OVERFLOW, 0, Limits(on_floor="raise"), SKIP),
        (Cause.FLOOR, 0, Limits(on_floor="raise"), HALT),
        (Cause.FLOOR, 0, Limits(on_floor="warn"), SKIP),
        (Cause.FLOOR, 0, Limits(on_floor="hold"), SKIP),
        (Cause.FLOOR, 1, Limits(1, "hold"), HALT),
    ],
)
def test_verdict_of(cause, skips, limits, verdict):
    assert verdict_of(cause, skips, limits) is verdict


@pytest.mark.parametrize(
    ("verdict", "cause", "skipped"),
    [
        (APPLY, Cause.NONE, False),
        (SKIP, Cause.OVERFLOW, True),
        (SKIP, Cause.LOSS_NONFINITE, True),
        (SKIP, Cause.NO_GRADIENTS, False),
        (HALT, Cause.FLOOR, True),
        (None, Cause.NONE, False),  # a replay that cannot tell
    ],
)
def test_is_skip(verdict, cause, skipped):
    assert is_skip(verdict, cause) is skipped


# Retries


def flags(rule, state, reading, left):
    return worth_retrying(rule, state, rule.advance(state, reading), reading, left)


def test_an_overflow_is_worth_a_retry_where_the_scale_falls():
    rule = rules.Backoff(init_scale=8, min_scale=4)
    assert flags(rule, rule.init(), OVERFLOW, 1) == (True, False)
    assert flags(rule, rule.init(), OVERFLOW, 0) == (False, False)
    assert flags(rule, rule.init()._replace(scale=4.0), OVERFLOW, 1) == (False, False)
    assert flags(rule, rule.init(), BAD_LOSS, 1) == (False, False)
    assert flags(rule, rule.init(), CLEAN, 9) == (False, False)


def test_a_far_larger_scale_is_tried_only_if_there_is_a_way_back():
    rule = rules.parse("auto:init_scale=1")
    tiny = Reading(nonfinite=False, amax=2.0**-20)
    assert flags(rule, rule.init(), tiny, 2) == (False, True)
    assert flags(rule, rule.init(), tiny, 1) == (False, False)
    assert flags(rule, rule.init(), tiny._replace(loss_nonfinite=True), 2) == (False, False)


def test_a_retry_is_no_skip():
    before, after = ScaleState(8.0, skips=3), ScaleState(4.0, skips=4, clean=5)
    state, clean_at = next_try(before, after, False, 0.0, 2)
    assert state == ScaleState(4.0, skips=3, clean=5)
    assert clean_at == 0.0


def test_the_last_try_goes_back_to_a_scale_at_which_the_batch_was_clean():
    small, large, lower = ScaleState(1.0), ScaleState(2.0**20), ScaleState(2.0**18)
    state, clean_at = next_try(small, large, True, 0.0, 3)
    assert (state.scale, clean_at) == (2.0**20, 1.0)
    state, clean_at = next_try(large, lower, False, clean_at, 2)
    assert (state.scale, clean_at) == (2.0**18, 1.0)  # one more try is left after this one
    state, clean_at = next_try(lower, ScaleState(2.0**16), False, clean_at, 1)
    assert (state.scale, clean_at) == (1.0, 1.0)


def test_the_last_try_goes_on_down_if_the_batch_was_never_clean():
    state, clean_at = next_try(ScaleState(8.0), ScaleState(4.0), False, 0.0, 1)
    assert (state.scale, clean_at) == (4.0, 0.0)


def test_the_ladder_on_arrays():
    """Traced code carries the same numbers."""
    array = lambda state: ScaleState(*map(np.asarray, state))
    rule = rules.Backoff(init_scale=8)
    before, after = rule.init(), rule.advance(rule.init(), OVERFLOW)
    reading = Reading(*map(np.asarray, OVERFLOW))
    lower, larger = worth_retrying(rule, array(before), array(after), reading, np.asarray(1), np)
    assert (bool(lower), bool(larger)) == (True, False)
    state, clean_at = next_try(
        array(before), array(after), larger, np.asarray(2.0), np.asarray(1), np
    )
    assert (float(state.scale), int(state.skips), float(clean_at)) == (2.0, 0, 2.0)


# The scale


def test_moved():
    rule = rules.Backoff(init_scale=16, growth_interval=1)
    state = rule.init()._replace(skips=2)
    assert moved(rule, state, OVERFLOW) == rule.advance(state, OVERFLOW)
    assert moved(rule, state, OVERFLOW)[:3] == (8.0, 0, 3)
    assert moved(rule, state, OVERFLOW, retry=True)[:3] == (8.0, 0, 2)
    assert moved(rule, state, OVERFLOW, dropped=True)[:3] == (8.0, 0, 0)
    assert moved(rule, state, CLEAN).scale == 32.0
    assert moved(rule, state, CLEAN, ceiling=16.0).scale == 16.0
    assert moved(rule, state, OVERFLOW, ceiling=16.0).scale == 8.0

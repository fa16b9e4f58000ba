"""Headroom, the rule behind "auto": what always holds, and stories with exact numbers."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import Cause, Reading, Verdict, rules
from gradlift.core import decide
from gradlift.errors import SettingsError, StateError
from gradlift.rules import Headroom
from gradlift.rules.base import is_power_of_two

ROOT = Path(__file__).parents[2]
TOP = 65504.0
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
DEAD_LOSS = Reading(nonfinite=True, amax=math.inf, loss_nonfinite=True)

rule_settings = st.builds(
    Headroom,
    init_scale=st.integers(-20, 32).map(lambda e: 2.0**e),
    margin_bits=st.integers(0, 64),
    band_bits=st.integers(0, 64),
    hold_bits=st.integers(0, 64),
    leak=st.integers(1, 64 * 65536),
    explore=st.integers(0, 64 * 65536),
    replicas=st.sampled_from([1, 2, 3, 1000, 2**31 - 1]),
    min_scale=st.sampled_from([2.0**-126, 2.0**-24]),
    max_scale=st.sampled_from([2.0**32, 2.0**126]),
)
magnitudes = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, 5e-324, 2.0**-149, 2.0**-126, 3.4e38, 1e300, TOP]),
    st.floats(0, 3.4e38),
)
readings = st.builds(
    Reading,
    nonfinite=st.booleans(),
    amax=magnitudes,
    loss_nonfinite=st.sampled_from([False, False, False, True]),
    checked=st.sampled_from([True, True, True, False]),
    norm=st.just(math.nan),
    probe_amax=st.one_of(st.just(math.nan), magnitudes),
)


def bits(scale):
    return round(math.log2(scale))


def closed_loop(rule, peaks, hidden=0, tries=8, state=None):
    """log2 of the scale each batch was applied with (None: lost), recomputations, the state.

    `peaks` are log2 of the true parameter amax (None: all zero); `hidden` bits lie above them.
    """
    state = state or rule.init()
    used, again = [], 0
    for peak in peaks:
        for attempt in range(tries + 1):
            before = state
            amax = 0.0 if peak is None else 2.0**peak * before.scale
            overflow = amax * 2.0**hidden > TOP
            amax = math.inf if overflow else amax if amax >= 2.0**-25 else 0.0
            state = rule.advance(before, Reading(nonfinite=overflow, amax=amax))
            if not overflow and not rule.recompute(before, state):
                used.append(bits(before.scale))
                break
            if attempt == tries:
                used.append(None if overflow else bits(before.scale))
            else:
                again += 1
    return used, again, state


# What always holds


@settings(max_examples=300, deadline=None)
@given(rule=rule_settings, trace=st.lists(readings, max_size=40))
def test_whatever_is_read(rule, trace):
    state = rule.init()
    for reading in trace:
        after = rule.advance(state, reading)
        assert is_power_of_two(after.scale)
        assert rule.min_scale <= after.scale <= rule.max_scale
        assert [type(x) for x in after] == [float] + [int] * 6
        assert all(abs(x) < 2**27 for x in after[1:])  # far inside 32 bits, between the steps too
        assert (after.clean >= 0, after.left, after.spread >= 0) == (True, 0, True)
        assert after.seen in (0, 1)
        if not reading.checked:
            assert after == state
        elif reading.loss_nonfinite:
            assert after == state._replace(skips=state.skips + 1)
        elif reading.nonfinite:
            assert after.scale < state.scale or state.scale == rule.min_scale
            assert after[4:] == state[4:]  # what was known stays known
        elif reading.amax == 0:
            assert after.scale >= state.scale
            assert after[4:] == state[4:]
        state = after
    assert rule.load(json.loads(json.dumps(rule.dump(state)))) == state


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(-24, 40),
    peak=st.integers(-20, 10),
    hidden=st.integers(0, 6),
    name=st.sampled_from(["auto", "auto:cautious"]),
)
def test_from_any_start_no_batch_is_lost_and_the_first_one_is_near(start, peak, hidden, name):
    rule = rules.parse(f"{name}{',' if ':' in name else ':'}init_scale={2.0**start}")
    used, again, state = closed_loop(rule, [peak], hidden)
    limit = math.floor(math.log2(TOP) - peak - hidden)
    assert 0 <= limit - used[0] <= 4
    assert again <= 6
    used, again, _ = closed_loop(rule, [peak] * 300, hidden, state=state)
    assert None not in used
    assert all(0 <= limit - e <= 4 for e in used)
    assert again <= 4


@settings(max_examples=100, deadline=None)
@given(trace=st.lists(st.floats(-30, 30), min_size=1, max_size=60), bump=st.integers(1, 5))
def test_a_larger_gradient_never_gives_a_larger_scale(trace, bump):
    rule = Headroom()
    low = high = rule.init()
    for x in trace:
        low = rule.advance(low, Reading(nonfinite=False, amax=2.0**x * low.scale))
        high = rule.advance(high, Reading(nonfinite=False, amax=2.0 ** (x + bump) * high.scale))
        assert high.level >= low.level
    assert high.scale <= low.scale


@pytest.mark.parametrize("name", ["auto", "auto:cautious", "headroom:explore=4194304,leak=4194304"])
@pytest.mark.parametrize("amax", [0.0, 1e-30, 100.0, math.nan])
def test_a_million_steps_of_anything(name, amax):
    """A state that comes back ends the run early: a rule is pure."""
    rule = rules.parse(name)
    turn = [Reading(nonfinite=False, amax=amax)] * 999 + [OVERFLOW]
    state, seen = rule.init(), set()
    for _ in range(1000):
        for reading in turn:
            state = rule.advance(state, reading)
        assert all(abs(x) < 2**27 for x in state[1:])
        if state in seen:
            break
        seen.add(state)


# Stories


def test_start_at_2_to_the_32():
    """2^32, 2^24, 2^8 fits: the first amax leads to 2^12, where 2^3 has its bit of margin."""
    used, again, _ = closed_loop(Headroom(init_scale=2.0**32), [2.5] * 3)
    assert used == [12, 12, 12]
    assert again == 3


def test_start_at_1_with_gradients_that_float16_cannot_hold():
    """At 1 all is zero; at 2^16 there is 2^-14 to see, enough to find 2^40, the largest allowed."""
    rule = Headroom(init_scale=1)
    used, again, state = closed_loop(rule, [-30.0] * 3)
    assert used == [40, 40, 40]
    assert again == 2
    assert rule.calibrated(state)


def test_zeros_at_the_start_raise_the_scale_to_2_to_the_16_and_no_further():
    used, again, state = closed_loop(Headroom(init_scale=1), [None] * 5)
    assert (used, again) == ([16] * 5, 1)
    assert not Headroom().calibrated(state)


def test_zeros_later_are_no_news():
    rule = Headroom()
    _, _, state = closed_loop(rule, [0.0] * 20)
    used, again, after = closed_loop(rule, [None] * 10_000, state=state)
    assert set(used) == {bits(state.scale)}
    assert again == 0
    assert after == state


def test_a_spike_of_ten_bits_costs_three_tries_and_is_forgotten():
    rule = rules.parse("auto")
    _, _, state = closed_loop(rule, [0.0] * 400)
    assert bits(state.scale) == 14
    used, again, _ = closed_loop(rule, [10.0, *[0.0] * 59], state=state)
    assert again == 3  # down by 2, by 4, by 8
    assert used[:10] == [0, 5, 6, 8, 9, 10, 10, 11, 11, 11]  # a quarter of the way back each time
    assert used[10:] == [12] * 18 + [13] * 31 + [14]  # the last two bits by the leak


def test_the_cautious_rule_remembers_the_spike():
    sharp, cautious = rules.parse("auto"), rules.parse("auto:cautious")
    after = {}
    for rule in (sharp, cautious):
        _, _, state = closed_loop(rule, [0.0] * 400)
        after[rule], _, _ = closed_loop(rule, [10.0, *[0.0] * 200], state=state)
    assert after[sharp][-1] - after[cautious][-1] >= 3


def test_a_non_finite_loss_moves_nothing():
    rule = Headroom()
    _, _, state = closed_loop(rule, [0.0] * 20)
    for _ in range(200):
        after = rule.advance(state, DEAD_LOSS)
        assert after == state._replace(skips=state.skips + 1)
        state = after


def test_ten_thousand_steps_of_tiny_gradients():
    """2^-25 and a half is found at the first batch and kept, to the end."""
    used, again, _ = closed_loop(Headroom(), [-25.5] * 10_000)
    assert used[0] == 40
    assert set(used) == {40}  # 2^40 is the largest scale it may use
    assert again == 1


def test_a_hidden_peak_is_found_once_and_then_explored_rarely():
    """Activations lie 5 bits above the parameters, which the rule never sees."""
    used, again, state = closed_loop(Headroom(), [-8.0] * 5000, hidden=5)
    assert None not in used
    limit = 18  # 2^(-8 + 5 + 18) = 2^15
    assert set(used[1:]) <= {limit - 2, limit - 1, limit}
    assert again <= 1 + 3 + 5000 * 96 / 65536 + 1
    assert 4 <= state.spread / 65536 <= 6.1


def test_search_doubles_and_climbs_back_by_evidence():
    rule = Headroom()
    _, _, state = closed_loop(rule, [0.0] * 1000)
    assert bits(state.scale) == 14
    fallen = []
    for _ in range(4):
        state = rule.advance(state, OVERFLOW)
        fallen.append(bits(state.scale))
    assert fallen == [12, 8, 0, -16]
    # It overflowed at 1 and not at 2^-16, says the search; but one search adds 4 bits at the most.
    state = rule.advance(state, Reading(nonfinite=False, amax=2.0**-16))
    assert bits(state.scale) == 11


def test_an_overflow_in_the_middle_gives_back_what_it_proves():
    rule = Headroom()
    _, _, state = closed_loop(rule, [0.0] * 1000)
    state = rule.advance(state, OVERFLOW)  # at 2^14, so the peak was 2^2 or more
    state = rule.advance(state, Reading(nonfinite=False, amax=2.0**12))
    assert bits(state.scale) == 13
    assert state.spread == 3 * 65536 - 256  # log2(65504) is 16 - 1/256 here


def test_a_batch_that_no_scale_can_cure_leaves_little_behind():
    """Nine tries of a poisoned batch end at the floor, where float16 holds nothing of the rest."""
    rule = Headroom()
    _, _, state = closed_loop(rule, [-8.0] * 1000)
    usual = bits(state.scale)
    for _ in range(9):
        state = rule.advance(state, OVERFLOW)
    assert state.scale == rule.min_scale
    used, again, _ = closed_loop(rule, [-8.0] * 4, state=state)
    assert used[0] == -24
    assert used[-1] >= usual - 4
    assert again == 0


def test_no_flapping_in_the_dead_band():
    """An amax that swings by half a bit around a boundary moves nothing once it is known."""
    used, again, _ = closed_loop(Headroom(), [0.25 if i % 2 else -0.25 for i in range(2000)])
    moves = [i for i in range(1, 2000) if used[i] != used[i - 1]]
    assert len(moves) <= 2
    assert again == 0


def test_probes_bound_the_gap_from_both_sides():
    rule = Headroom(init_scale=1)
    probed = Reading(nonfinite=False, amax=1.0, probe_amax=64.0)
    state = rule.advance(rule.init(), probed)
    assert bits(state.scale) == 8  # 6 bits above, and the margin
    assert bits(rule.advance(rule.init(), probed._replace(probe_amax=math.nan)).scale) == 14
    # Later a probe is believed as it is, and nothing above it by more than hold_bits is kept.
    state = rule.advance(state, Reading(nonfinite=False, amax=256.0, probe_amax=256.0 * 2**9))
    assert state.spread == 9 * 65536
    state = rule.advance(state, Reading(False, amax=state.scale, probe_amax=state.scale))
    assert state.spread == 2 * 65536


def test_a_probe_of_the_unknown_is_no_probe():
    rule = Headroom()
    _, _, state = closed_loop(rule, [0.0] * 20)
    plain = rule.advance(state, Reading(nonfinite=False, amax=state.scale))
    for probe in (0.0, math.inf, float("nan")):
        reading = Reading(nonfinite=False, amax=state.scale, probe_amax=probe)
        assert rule.advance(state, reading) == plain


@pytest.mark.parametrize(("replicas", "extra"), [(1, 0), (2, 1), (3, 2), (8, 3), (1000, 10)])
def test_averaging_over_replicas_hides_their_peaks(replicas, extra):
    rule = Headroom(init_scale=1, replicas=replicas)
    reading = Reading(nonfinite=False, amax=1.0)
    assert bits(rule.advance(rule.init(), reading).scale) == 14 - extra
    assert rules.parse(str(rule)) == rule
    # A probe looks before the average is taken: it needs no allowance.
    probed = reading._replace(probe_amax=2.0**12)
    assert bits(rule.advance(rule.init(), probed).scale) == 2


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"replicas": 0}, "replicas is 0, expected 1 or more"),
        ({"replicas": 1.5}, "replicas is 1.5, expected a whole number"),
        ({"hold_bits": -1}, "hold_bits is -1"),
        ({"margin_bits": 65}, "margin_bits is 65, expected 0 to 64"),
        ({"explore": -1}, "explore is -1"),
        ({"leak": 2**30}, "leak is 1073741824, in 1/65536 of a bit"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Headroom(**given)


def test_text_form_of_all_settings():
    rule = Headroom(margin_bits=4, hold_bits=7, explore=0, replicas=16, leak=3)
    assert str(rule) == "headroom:margin_bits=4,hold_bits=7,leak=3,explore=0,replicas=16"
    assert rules.parse(str(rule)) == rule


def test_the_floor_is_a_cause_and_above_it_a_retry_is_offered():
    rule = Headroom(init_scale=4, min_scale=1)
    state = rule.init()
    assert decide(OVERFLOW, state, rule, retries_left=1) == (Verdict.RETRY, Cause.OVERFLOW)
    state = rule.advance(state, OVERFLOW)
    assert state.scale == 1
    assert decide(OVERFLOW, state, rule, retries_left=1) == (Verdict.SKIP, Cause.FLOOR)


# The benchmark


def test_controllers_benchmark_runs_and_its_figures_are_those_of_a_plain_loop(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "controllers.py", "--quick", "--out", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    data = json.loads((tmp_path / "controllers.json").read_text())
    assert not set(data["seeds"]) & set(data["tuning_seeds"])
    assert f"reported on seeds {data['seeds']}" in " ".join(ran.stdout.split())
    assert len(list(tmp_path.glob("*.svg"))) == len(data["kinds"]) + 1
    assert "## Goals" in (tmp_path / "table.md").read_text()
    recording = json.loads((ROOT / "benchmarks" / "traces" / "gpt.json").read_text())
    rule, row = rules.parse("auto"), data["rows"]["auto"]["recorded gpt"]
    hidden = {p - a for a, p in zip(recording["log2_amax"], recording["log2_peak"])}
    assert hidden == {0.0}  # else the loop here would need it
    used, again, _ = closed_loop(rule, recording["log2_amax"])
    unused = [math.log2(TOP) - p - e for p, e in zip(recording["log2_peak"], used)]
    assert row["lost"] == used.count(None) == 0
    assert row["retries"] == 1000 * again / len(used)
    assert row["unused"] == pytest.approx(sum(unused) / len(used), abs=1e-9)


@pytest.mark.parametrize(
    "damage",
    [{"seen": 1000}, {"level": 2**31 - 1}, {"spread": -1}, {"spread": 2**31 - 1}, {"clean": 65}],
)
def test_a_state_that_it_could_not_have_made_is_refused(damage):
    rule = rules.parse("auto")
    with pytest.raises(StateError, match=next(iter(damage))):
        rule.load({**rule.dump(rule.init()), **damage})

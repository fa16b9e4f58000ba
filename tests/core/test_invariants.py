"""What holds for every rule, whatever the readings."""

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlift import Reading, rules
from gradlift.rules.base import is_power_of_two

EVERY = [
    *rules.PRESETS,
    "off",
    "static:8",
    "backoff:growth_interval=3,hysteresis=3,hysteresis_refill=streak,tolerance=0.2",
    "backoff:growth_interval=1,growth_factor=2^20,backoff_factor=2^-20",
    "late-backoff:growth_interval=2",
    "widening-backoff:growth_interval=1",
    "headroom:margin_bits=0,band_bits=0,leak=1000",
    "headroom:format=e4m3",
]
every_rule = pytest.mark.parametrize("rule", [rules.parse(n) for n in EVERY], ids=EVERY)

magnitudes = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, 5e-324, 2.0**-149, 3.4e38, 1e300, 65504.0]),
    st.floats(0, 3.4e38),
)
readings = st.builds(
    Reading,
    nonfinite=st.booleans(),
    amax=magnitudes,
    loss_nonfinite=st.booleans(),
    checked=st.booleans(),
    norm=magnitudes,
    probe_amax=magnitudes,
)


def check(rule, state):
    assert [type(x) for x in state] == [float] + [int] * 6, state
    assert rule.min_scale <= state.scale <= rule.max_scale
    assert 2.0**-126 <= state.scale <= 2.0**126
    inverse = struct.unpack("f", struct.pack("f", 1 / state.scale))[0]
    assert math.isfinite(inverse)
    assert inverse > 0
    if rule.powers_only:
        assert is_power_of_two(state.scale)
    assert all(abs(x) < 2**31 for x in state[1:])


@every_rule
@settings(max_examples=60, deadline=None)
@given(trace=st.lists(readings, max_size=60))
def test_adversarial_readings(rule, trace):
    state = rule.init()
    check(rule, state)
    for reading in trace:
        after = rule.advance(state, reading)
        check(rule, after)
        if not reading.checked:
            assert after == state
        if reading.loss_nonfinite:
            assert after.scale >= state.scale
        assert rule.advance(state, reading) == after  # pure
        state = after
    assert rule.load(json.loads(json.dumps(rule.dump(state)))) == state


def run(rule, readings, steps):
    """Advances `steps` times over the readings in turn. A rule is pure: once a state comes back at
    the same place in the turn, everything after it was seen, so the rest need not be run."""
    state, seen = rule.init(), set()
    for i in range(steps):
        after = rule.advance(state, readings[i % len(readings)])
        if after.scale != state.scale or i < 100:
            check(rule, after)
        state = after
        key = (i % len(readings), state._replace(skips=0))
        if key in seen:
            break
        seen.add(key)
    check(rule, state)
    return state


@every_rule
def test_a_million_overflows(rule):
    overflow = Reading(nonfinite=True, amax=math.inf)
    state = run(rule, [overflow], 10**6)
    dynamic = rule.min_scale < rule.max_scale
    assert state.scale == rule.min_scale or not dynamic
    assert rule.advance(state, overflow).scale <= state.scale


@pytest.mark.parametrize("amax", [0.0, 1.0, math.nan])
@every_rule
def test_a_million_clean_steps(rule, amax):
    clean = Reading(nonfinite=False, amax=amax)
    run(rule, [clean], 10**6 if amax == 1.0 else 10**4)


@every_rule
def test_alternating(rule):
    pair = Reading(nonfinite=True, amax=math.inf), Reading(nonfinite=False, amax=100.0)
    run(rule, pair, 10**5)

"""Rules: settings, text form, and stories with exact numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlift import Reading, rules
from gradlift.errors import GradliftError, SettingsError, StateError
from gradlift.rules import Backoff, Headroom, Off, Static

CLEAN = Reading(nonfinite=False, amax=1.0)
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
DEAD_LOSS = Reading(nonfinite=True, amax=math.inf, loss_nonfinite=True)
NOTHING = Reading(nonfinite=False, amax=0.0, checked=False)


def scales(rule, readings):
    state, out = rule.init(), []
    for reading in readings:
        state = rule.advance(state, reading)
        out.append(state.scale)
    return out


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"growth_factor": 1}, "growth_factor is 1.0, expected more than 1"),
        ({"growth_factor": 0.5}, "expected more than 1"),
        ({"growth_factor": 3}, "not a power of two.*take 2 or 4"),
        ({"backoff_factor": 1}, r"expected a number in \(0, 1\)"),
        ({"backoff_factor": 0}, "finite number above 0"),
        ({"backoff_factor": -0.5}, "finite number above 0"),
        ({"growth_interval": 0}, "growth_interval is 0, expected 1 or more"),
        ({"growth_interval": 2.5}, "whole number"),
        ({"growth_interval": True}, "whole number"),
        ({"init_scale": math.nan}, "finite number above 0"),
        ({"init_scale": math.inf}, "finite number above 0"),
        ({"init_scale": -8}, "finite number above 0"),
        ({"init_scale": "8"}, "expected a number"),
        ({"init_scale": 1000}, "not a power of two.*take 512 or 2\\^10"),
        ({"init_scale": 2.0**41}, "outside"),
        ({"min_scale": 16, "max_scale": 8}, "min_scale <= max_scale"),
        ({"min_scale": 2.0**-130, "init_scale": 1}, "2\\^-126"),
        ({"max_scale": 2.0**127}, "2\\^126"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"hysteresis_refill": "never"}, "'growth', 'clean', 'streak'"),
        ({"tolerance": 1.5}, "share"),
        ({"tolerance": -0.1}, "share"),
        ({"recover_below": 64}, "go together"),
        ({"growth_late": "soon"}, "growth_late"),
        ({"powers_of_two": 3}, "powers_of_two"),
    ],
)
def test_backoff_refuses(settings, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Backoff(**settings)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Static(0), "finite number above 0"),
        (lambda: Static(1000), "not a power of two"),
        (lambda: Static(2.0**-130), "outside"),
        (lambda: Static(math.nan), "finite"),
        (lambda: Headroom(margin_bits=-1), "margin_bits"),
        (lambda: Headroom(leak=0), "leak"),
        (lambda: Headroom(format="fp16"), "gradlift.formats.Format"),
        (lambda: Headroom(init_scale=3), "not a power of two"),
        (lambda: rules.parse("fairseq:tolerance=abc"), "share"),
        (lambda: rules.preset("megatron", histeresis=2), "no setting 'histeresis'"),
        (lambda: rules.preset("off", scale=2), "it has none"),
        (lambda: rules.parse("deepsped"), "did you mean 'deepspeed'"),
        (lambda: rules.parse("megatron:4"), "'4' is not a setting"),
        (lambda: rules.parse("static:many"), "expected a number"),
        (lambda: rules.parse(""), "no rule is called"),
        (lambda: rules.parse("0"), "finite number above 0"),
        (lambda: rules.parse("nan"), "finite number above 0"),
        (lambda: rules.parse("2^99999"), "no rule is called"),
    ],
)
def test_refusals_say_why(make, complaint):
    with pytest.raises(SettingsError, match=complaint) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GradliftError)


@pytest.mark.parametrize("name", [*rules.PRESETS, "off", "static"])
def test_text_form_of_every_preset_parses_back(name):
    rule = rules.preset(name)
    assert rules.parse(name) == rule
    assert rules.parse(str(rule)) == rule


def test_parse_reads_what_the_design_promises():
    assert rules.parse("auto") == Headroom()
    assert rules.parse("auto:cautious").margin_bits > rules.parse("auto").margin_bits
    assert rules.parse("dynamic") == Backoff()
    assert rules.parse("static:1024") == rules.parse("1024") == Static(1024)
    assert rules.parse("off") == Off()
    wanted = rules.preset("megatron", hysteresis=4, min_scale=2**-4)
    assert rules.parse(" Megatron: hysteresis=4 , min_scale=2^-4 ") == wanted
    assert rules.parse("headroom:format=bf16").format.name == "BF16"
    assert rules.parse("auto:cautious,leak=2").leak == 2
    assert rules.parse(wanted) is wanted


powers = st.integers(-20, 30).map(lambda e: 2.0**e)


@given(
    init=powers,
    growth=st.integers(1, 9).map(lambda e: 2.0**e),
    interval=st.integers(1, 10**6),
    hysteresis=st.integers(1, 9),
    refill=st.sampled_from(["growth", "clean", "streak"]),
    tolerance=st.floats(0, 1),
    late=st.sampled_from(["never", "first", "every"]),
)
def test_any_backoff_parses_back(init, growth, interval, hysteresis, refill, tolerance, late):
    rule = Backoff(
        init_scale=init,
        growth_factor=growth,
        backoff_factor=1 / growth,
        growth_interval=interval,
        hysteresis=hysteresis,
        hysteresis_refill=refill,
        tolerance=tolerance,
        growth_late=late,
        recover_below=64,
        recover_interval=interval,
    )
    assert rules.parse(str(rule)) == rule


def test_three_clean_steps_one_overflow():
    rule = Backoff(init_scale=8, growth_interval=3)
    assert scales(rule, [CLEAN] * 3 + [OVERFLOW, CLEAN, CLEAN, CLEAN]) == [8, 8, 16, 8, 8, 8, 16]


def test_a_non_finite_loss_keeps_scale_and_counters():
    rule = Backoff(init_scale=8, growth_interval=2)
    assert scales(rule, [CLEAN, *[DEAD_LOSS] * 200, CLEAN]) == [8] * 201 + [16]


def test_a_step_without_gradients_is_no_step():
    rule = Backoff(init_scale=8, growth_interval=2, hysteresis=2)
    state = rule.advance(rule.init(), OVERFLOW)
    assert rule.advance(state, NOTHING) == state


def test_skips_count_in_a_row_whatever_the_cause():
    rule = Backoff()
    state = rule.init()
    for reading in (OVERFLOW, DEAD_LOSS, NOTHING, OVERFLOW):
        state = rule.advance(state, reading)
    assert state.skips == 3
    assert rule.advance(state, CLEAN).skips == 0


def test_floor_and_ceiling_hold():
    rule = Backoff(init_scale=4, min_scale=2, max_scale=8, growth_interval=1)
    assert scales(rule, [OVERFLOW] * 3 + [CLEAN] * 4) == [2, 2, 2, 4, 8, 8, 8]


def test_static_never_moves_but_counts():
    rule = Static(8)
    assert scales(rule, [OVERFLOW, CLEAN, DEAD_LOSS]) == [8, 8, 8]
    assert rule.advance(rule.init(), OVERFLOW).skips == 1


def test_off_moves_nothing():
    assert Off().advance(Off().init(), OVERFLOW) == Off().init()


@pytest.mark.parametrize("start", [2.0**-20, 1.0, 2.0**16, 2.0**24])
def test_headroom_calibrates_on_the_first_reading(start):
    rule = Headroom(init_scale=start)
    amax = 2.0**-9  # of the true gradients: 2^23 brings it to 2^14, a bit and more below 65504
    assert scales(rule, [Reading(nonfinite=False, amax=amax * start)]) == [2.0**23]


def closed_loop(rule, peaks):
    """Scales used, with real overflow: a batch overflows when its peak times the scale does."""
    state, used, lost = rule.init(), [], 0
    for peak in peaks:
        scaled = peak * state.scale
        overflow = scaled > 65504
        lost += overflow
        used.append(state.scale)
        amax = math.inf if overflow else scaled
        state = rule.advance(state, Reading(nonfinite=overflow, amax=amax))
    return used, lost


def test_headroom_finds_the_way_down_in_doubling_jumps():
    used, lost = closed_loop(Headroom(init_scale=2.0**32), [8.0] * 12)
    assert used[:4] == [2.0**e for e in (32, 24, 8, 11)]
    assert lost == 2  # torch's rule loses 20
    assert set(used[3:]) == {2.0**11}  # 8 * 2^11 = 2^14: more than a bit of room


def test_headroom_spike_costs_one_batch_and_is_forgotten():
    peaks = [1.0] * 50 + [2.0**10] + [1.0] * 600
    used, lost = closed_loop(Headroom(init_scale=1), peaks)
    assert lost == 1
    assert used[49] == 2.0**14
    assert used[-1] == 2.0**13  # one bit lower: inside the dead band


def test_headroom_does_not_flap():
    peaks = [1.0 if i % 2 else 1.5 for i in range(400)]
    used, lost = closed_loop(Headroom(init_scale=1), peaks)
    assert lost == 0
    assert len(set(used[2:])) == 1


def test_headroom_listens_to_probes():
    rule = Headroom(init_scale=1)
    seen = Reading(nonfinite=False, amax=1.0, probe_amax=64.0)
    assert scales(rule, [seen]) == [2.0**8]
    assert scales(rule, [seen._replace(probe_amax=math.nan)]) == [2.0**14]


# State


def test_state_round_trips():
    rule = rules.preset("megatron")
    state = rule.advance(rule.init(), OVERFLOW)
    assert rule.load(rule.dump(state)) == state


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scale": math.nan}, "finite number above 0"),
        ({"scale": 0.0}, "finite number above 0"),
        ({"scale": -8.0}, "finite number above 0"),
        ({"scale": math.inf}, "finite number above 0"),
        ({"scale": "8"}, "expected a number"),
        ({"scale": True}, "expected a number"),
        ({"scale": 2.0**50}, r"outside this rule's \[2\^-24, 2\^40\]"),
        ({"scale": 1000.0}, "not a power of two"),
        ({"clean": -1}, "clean is -1"),
        ({"clean": 1.5}, "32-bit integer"),
        ({"left": 2**40}, "32-bit integer"),
        ({"seen": None}, "32-bit integer"),
        ({"schema": 2}, "schema 2"),
        ({"schema": True}, "schema True"),
        ({"rule": "headroom"}, "saved by the rule 'headroom'.*init_scale=65536.0"),
    ],
)
def test_damaged_state_is_refused(change, complaint):
    rule = Backoff()
    with pytest.raises(StateError, match=complaint):
        rule.load({**rule.dump(rule.init()), **change})


@pytest.mark.parametrize("missing", ["scale", "clean", "seen"])
def test_incomplete_state_is_refused(missing):
    rule = Backoff()
    data = rule.dump(rule.init())
    del data[missing]
    with pytest.raises(StateError, match=f"lacks '{missing}'"):
        rule.load(data)
    with pytest.raises(StateError, match="a dict, this is list"):
        rule.load([])

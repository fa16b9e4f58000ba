"""core/state.py: the one saved layout, what it keeps, and each refusal."""

import copy
import json
import math

import pytest

from gradlift import Reading, rules
from gradlift.core import state as saved_state
from gradlift.errors import StateError
from gradlift.rules import Backoff

RULE = Backoff(init_scale=16, growth_interval=4)
RULES = ["dynamic", "megatron", "fairseq", "metaseq", "auto", "auto:cautious", "static:8", "off"]
CLEAN = Reading(nonfinite=False, amax=1.0)
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
TORCHS = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


def saved(**changes):
    """A state with some entries changed; those of our own have a leading "own_"."""
    data = saved_state.save(RULE, RULE.init(), steps=3, skipped=1)
    for name, value in changes.items():
        home = data["gradlift"] if name.startswith("own_") else data
        home[name.removeprefix("own_")] = value
    return data


@pytest.mark.parametrize("text", RULES)
def test_a_state_comes_back(text):
    rule = rules.parse(text)
    state = rule.init()
    for reading in (CLEAN, OVERFLOW, OVERFLOW, CLEAN, CLEAN):
        state = rule.advance(state, reading)
    data = saved_state.save(rule, state, steps=5, skipped=2, sharp=False)
    loaded = saved_state.load(rule, json.loads(json.dumps(data)))
    assert loaded[:5] == (rule, state, 5, 2, False)
    assert loaded.own == data["gradlift"]


def test_the_layout():
    assert saved_state.save(RULE, RULE.init(), steps=3, skipped=1, keys="{}") == {
        "scale": 16.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 4,
        "_growth_tracker": 0,
        "gradlift": {
            "schema": 1,
            "rule": "backoff",
            "sharp": True,
            "skips": 0,
            "left": 1,
            "level": 0,
            "spread": 0,
            "seen": 0,
            "steps": 3,
            "skipped": 1,
            "keys": "{}",
        },
    }


def test_loading_leaves_what_it_was_given():
    data = saved()
    before = copy.deepcopy(data)
    saved_state.load(RULE, data, adopt=True)
    assert data == before


def test_torchs_own_state():
    loaded = saved_state.load(RULE, TORCHS)
    assert loaded.state == RULE.init()._replace(scale=1024.0, clean=7)
    assert (loaded.steps, loaded.skipped, loaded.sharp, loaded.own) == (0, 0, False, {})
    assert loaded.rule is RULE  # a rule that was chosen keeps its factors


def test_torchs_factors_are_adopted_where_the_rule_is_torchs():
    theirs = {**TORCHS, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 10}
    rule = saved_state.load(RULE, theirs, adopt=True).rule
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (4.0, 0.25, 10)
    odd = saved_state.load(RULE, {**theirs, "scale": 1000.0}, adopt=True)
    assert odd.state.scale == 1000.0
    assert not odd.rule.powers_of_two


def test_a_scale_beyond_the_bounds_is_brought_inside():
    rule = Backoff(init_scale=16, min_scale=8, max_scale=32)
    for scale, wanted in ((2.0, 8.0), (1024.0, 32.0), (16.0, 16.0)):
        assert saved_state.load(rule, {**TORCHS, "scale": scale}).state.scale == wanted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "the scaler state is empty: it was saved from a scaler that was disabled"),
        (None, "a scaler state is a dict, this is NoneType"),
        ([1], "a scaler state is a dict, this is list"),
        ({"scale": 8.0}, "this scaler state lacks 'growth_factor'"),
        *(({k: v for k, v in saved().items() if k != name}, f"lacks '{name}'") for name in TORCHS),
        (saved(growth_factor="2"), "growth_factor is '2', expected a finite number"),
        (saved(backoff_factor=math.nan), "backoff_factor is nan, expected a finite number"),
        (saved(growth_interval=True), "growth_interval is True, expected a finite number"),
        (saved(gradlift=3), "'gradlift' entry has an unknown schema: 3"),
        (saved(own_schema=2), "'gradlift' entry has an unknown schema"),
        (saved(own_schema=True), "'gradlift' entry has an unknown schema"),
        (
            saved(own_rule="headroom"),
            "was saved with the rule 'headroom', this scaler has 'backoff': make the scaler with "
            "the same rule",
        ),
        (saved(scale=math.nan), "scale is nan, expected a finite number above 0"),
        (saved(scale=math.inf), "scale is inf, expected a finite number above 0"),
        (saved(scale=0.0), "scale is 0.0, expected a finite number above 0"),
        (saved(scale=-8.0), "scale is -8.0, expected a finite number above 0"),
        (saved(scale=10**400), "scale is inf, expected a finite number above 0"),
        (saved(scale=-(10**400)), "scale is -1.0, expected a finite number above 0"),
        (saved(scale="8"), "scale is '8', expected a number"),
        (saved(scale=3.0), "scale is 3.0, not a power of two: it would round gradients"),
        (saved(_growth_tracker=-1), "clean is -1, expected 0 or more"),
        (saved(_growth_tracker=1.5), "clean is 1.5, expected a 32-bit integer"),
        (saved(own_skips=2**31), "skips is 2147483648, expected a 32-bit integer"),
        (saved(own_left=None), "left is None, expected a 32-bit integer"),
        (saved(own_steps=-1), "steps and skipped are (-1, 1), expected two counts"),
        (saved(own_skipped=1.0), "steps and skipped are (3, 1.0), expected two counts"),
    ],
)
def test_refusals(data, message):
    with pytest.raises(StateError) as refused:
        saved_state.load(RULE, data)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["skips", "left", "level", "spread", "seen"])
def test_a_history_with_a_gap_is_refused(name):
    data = saved()
    del data["gradlift"][name]
    with pytest.raises(StateError, match=f"'gradlift' entry lacks '{name}'"):
        saved_state.load(RULE, data)


@pytest.mark.parametrize(
    "change",
    [
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
    ],
)
def test_factors_that_cannot_work_are_not_adopted(change):
    [name] = change
    with pytest.raises(StateError, match=name):
        saved_state.load(RULE, {**TORCHS, **change}, adopt=True)
    assert saved_state.load(RULE, {**TORCHS, **change}).state.scale == 1024.0  # not its own

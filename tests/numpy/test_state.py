"""Saved, loaded, gone on: the same rule, the same bits; damage is refused."""

import json
import math

import numpy as np
import pytest
from helpers.numpy import batch, sgd, train

import gradlift.numpy as gl
from gradlift import Journal, read_journal
from gradlift.errors import StateError


def test_state_resumes_to_the_bit():
    _, scaler = train(steps=30)
    data = json.loads(json.dumps(scaler.state_dict()))
    fresh = gl.Scaler("auto")
    fresh.load_state_dict(data)
    assert fresh.state == scaler.state
    assert (fresh.steps, fresh.skipped_steps) == (scaler.steps, scaler.skipped_steps)


def test_the_header_has_the_rule_of_a_state_that_was_loaded(tmp_path):
    sharp = gl.Scaler("auto")
    sharp.train_step(batch(1.0), {"w": np.ones(1, np.float32)}, sgd, retries=1)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("auto", journal=journal)
        scaler.load_state_dict(sharp.state_dict())
        scaler.train_step(batch(1.0), {"w": np.ones(1, np.float32)}, sgd)
    assert read_journal(tmp_path / "run.jsonl").header["rule"] == "headroom"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: None,
        lambda d: {},
        lambda d: {**d, "gradlift": {**d["gradlift"], "schema": 9}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "steps": -1}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "skipped": "3"}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "rule": "backoff"}},
        lambda d: {**d, "gradlift": {"schema": 1, "rule": "headroom"}},
        lambda d: {**d, "scale": math.nan},
        lambda d: {**d, "_growth_tracker": "many"},
    ],
)
def test_damaged_state_changes_nothing(damage):
    scaler = gl.Scaler("auto")
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict(damage(scaler.state_dict()))
    assert scaler.state_dict() == before

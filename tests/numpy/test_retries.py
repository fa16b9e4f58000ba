"""The same batch again at a lower scale: no batch is lost, and nothing else changes."""

import math

import numpy as np
import pytest
from helpers.numpy import batch, sgd

import gradlift.numpy as gl
from gradlift import Cause, Journal, Verdict, read_journal


def test_retry_loses_no_batch_and_equals_a_run_that_started_there(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("dynamic", journal=journal)
        weights = {"w": np.ones(1, np.float32)}
        result = scaler.train_step(batch(8.0), weights, sgd, retries=5)
    assert (result.verdict, result.retries, result.scale) == (Verdict.APPLY, 4, 2.0**12)
    other = {"w": np.ones(1, np.float32)}
    gl.Scaler("dynamic:init_scale=2^12").train_step(batch(8.0), other, sgd)
    assert weights["w"] == other["w"] == -7.0
    run = read_journal(tmp_path / "run.jsonl")
    assert [e.what for e in run.events] == ["retry"] * 4
    assert run.events[0].detail["culprits"] == ["w (inf)"]
    assert run.steps[0].retries == 4


def test_retries_run_out():
    weights = {"w": np.ones(1, np.float32)}
    result = gl.Scaler("dynamic").train_step(batch(8.0), weights, sgd, retries=3)
    assert (result.verdict, result.cause, result.retries) == (Verdict.SKIP, Cause.OVERFLOW, 3)
    assert weights["w"] == 1


def test_a_non_finite_loss_is_not_retried():
    calls = []

    def compute(scale):
        calls.append(scale)
        return math.nan, {"w": np.float16([np.nan])}

    result = gl.Scaler("dynamic").train_step(compute, {"w": np.ones(1, np.float32)}, sgd, retries=3)
    assert (result.cause, len(calls)) == (Cause.LOSS_NONFINITE, 1)


@pytest.mark.parametrize("retries", range(7))
def test_a_sound_first_batch_is_never_lost_by_trying_a_higher_scale(retries):
    def compute(scale):  # finite up to 2^17, and far below that as far as amax shows
        gradient = np.inf if scale > 2.0**17 else 6e-6 * scale
        return 1.0, {"w": np.float32([gradient])}

    scaler = gl.Scaler("auto")
    result = scaler.train_step(compute, {"w": np.ones(1)}, lambda w, g: None, retries=retries)
    assert result.stepped

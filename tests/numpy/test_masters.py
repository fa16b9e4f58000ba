"""16-bit parameters and their FP32 masters."""

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl
from gradlift import Cause


def test_masters_keep_what_float16_would_lose():
    half = {"w": np.ones(1, np.float16)}
    masters, scaler = gl.Masters(half), gl.Scaler("static:2^10")
    for _ in range(1000):
        scaler.step(masters, {"w": np.float16([-1e-4 * 2**10])}, sgd)
    assert half["w"][0] == pytest.approx(1.1, abs=1e-3)
    assert half["w"].dtype == np.float16


def test_a_weight_whose_master_leaves_float16_stays_at_its_largest_number():
    half = {"a": np.full(2, 65000, np.float16), "b": -np.full(2, 65000, np.float16)}
    half["c"] = np.ones(2, np.float16)
    masters, scaler = gl.Masters(half), gl.Scaler("static:1")
    grads = {"a": np.float32([-1000, 0]), "b": np.float32([0, 1000]), "c": np.zeros(2, np.float32)}
    result = scaler.step(masters, grads, lambda w, g: [w[n].__isub__(g[n]) for n in w])
    assert (result.stepped, result.cause) == (True, Cause.WEIGHT_RANGE)
    assert list(result.culprits) == ["a", "b"]
    assert "stays at 65504" in result.notes[0]
    assert half["a"].tolist() == [65504, 64992]
    assert half["b"].tolist() == [-64992, -65504]
    assert masters["a"][0] == 65992
    assert scaler.skipped_steps == 0


def test_weights_that_are_not_finite_are_named_at_the_first_bad_step():
    weights = {"a": np.ones(2, np.float32), "b": np.float32([1, np.nan])}
    scaler = gl.Scaler("dynamic")
    scaler.scale(np.float32(np.nan))
    result = scaler.step(weights, {"a": np.float32([np.nan, 1])}, sgd)
    assert not result.stepped
    assert "the weight b holds nan itself" in result.notes[0]

"""Clipping measures true gradients."""

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl
from gradlift.errors import SettingsError


def test_clipping_sees_true_gradients_and_the_true_norm():
    scaler = gl.Scaler("static:2^10")
    weights = {"w": np.zeros(2, np.float32)}
    grads = {"w": np.float32([3, 4]) * 2**10}
    result = scaler.step(weights, grads, sgd, max_norm=1.0)
    assert result.grad_norm == 5.0
    np.testing.assert_allclose(weights["w"], [-0.6, -0.8], rtol=1e-6)  # torch's 1e-6 in the norm
    result = scaler.step(weights, {"w": np.float32([0.3, 0]) * 2**10}, sgd, max_norm=1.0)
    assert weights["w"][0] == np.float32(-0.6) - np.float32(0.3) or result.stepped


def test_no_rounding_below_the_clipping_norm():
    rng = np.random.default_rng(0)
    g = rng.standard_normal(1000).astype(np.float32)
    true = gl.unscale({"w": g * np.float32(2**13)}, 2.0**13, max_norm=1e9, norm=1.0)
    assert (true["w"] == g).all()


def test_off_clips_where_asked_and_a_bad_norm_is_refused():
    weights = {"w": np.zeros(1, np.float32)}
    gl.Scaler("off").step(weights, {"w": np.float32([100.0])}, sgd, max_norm=1.0)
    assert weights["w"][0] == pytest.approx(-1.0)
    for rule in ("off", "dynamic"):
        with pytest.raises(SettingsError, match="max_norm is -1"):
            gl.Scaler(rule).step(weights, {"w": np.float32([100.0])}, sgd, max_norm=-1)

"""What is used is what is checked: every element, every format, every layout."""

import math

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl
from gradlift import Cause


def test_what_is_used_is_checked():
    """Finite scaled gradients that leave float32 when the scale is taken out are not applied."""
    scaler = gl.Scaler("static:2^-20")
    weights = {"w": np.ones(1, np.float32)}
    result = scaler.step(weights, {"w": np.float32([3e38])}, sgd)
    assert not result.stepped
    assert weights["w"] == 1


@pytest.mark.parametrize("rule", ["static:1", "static:2^20"])
def test_a_finite_float64_gradient_that_leaves_float32_is_skipped_and_named(rule):
    """Also one that would be in its range again without the scale: it is unscaled in float32."""
    scaler, weights = gl.Scaler(rule), {"v": np.ones(1), "w": np.ones(1)}
    for g in (1e40, -1e200, np.finfo(np.float64).max):
        result = scaler.step(weights, {"v": np.ones(1), "w": np.float64([g])}, sgd)
        assert not result.stepped
        assert [(c, c.kind) for c in result.culprits] == [("w", "inf")]
    assert weights == {"v": 1, "w": 1}


def test_single_arrays_and_missing_gradients():
    w = np.ones(2, np.float32)
    scaler = gl.Scaler("static:4")
    scaler.step(w, np.float16([4, 8]), lambda w, g: np.subtract(w, g, out=w))
    assert (w == [0, -1]).all()
    weights = {"w": np.ones(1, np.float32), "frozen": np.ones(1, np.float32)}
    scaler.step(weights, {"w": np.float16([4]), "frozen": None}, sgd)
    assert (weights["w"], weights["frozen"]) == (0, 1)


def test_a_vector_loss_in_float16_is_judged_by_its_elements():
    scaler, weights = gl.Scaler("static:1"), {"w": np.zeros(1, np.float32)}
    scaler.scale(np.full(2000, 100.0, np.float16))
    assert scaler.step(weights, {"w": np.float32([1.0])}, sgd).stepped


def test_a_loss_is_that_of_one_step():
    scaler, weights = gl.Scaler("static:1"), {"w": np.zeros(1, np.float32)}
    for loss, cause in ((math.nan, Cause.LOSS_NONFINITE), (1.0, Cause.OVERFLOW)):
        scaler.scale(loss)
        assert scaler.step(weights, {"w": np.float32([math.inf])}, sgd).cause is cause


def test_gradients_of_any_dtype_are_unscaled_in_float32():
    fine = np.float32([1 + 2.0**-23, 2.0**100, 2.0**-100])
    for g in (fine, fine.astype(np.float64)):
        true = gl.unscale({"w": g}, 4.0)["w"]
        assert true.dtype == np.float32
        assert (true == fine / 4).all()
    assert gl.unscale({"w": np.float16([2.0**-24])}, 2.0**20)["w"] == 2.0**-44

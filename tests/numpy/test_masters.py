"""16-bit parameters and their FP32 masters."""

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl


def test_masters_keep_what_float16_would_lose():
    half = {"w": np.ones(1, np.float16)}
    masters, scaler = gl.Masters(half), gl.Scaler("static:2^10")
    for _ in range(1000):
        scaler.step(masters, {"w": np.float16([-1e-4 * 2**10])}, sgd)
    assert half["w"][0] == pytest.approx(1.1, abs=1e-3)
    assert half["w"].dtype == np.float16

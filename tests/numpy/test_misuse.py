"""Calls and settings that cannot work are refused with what to do instead."""

import math

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl
from gradlift.errors import SettingsError


def test_refusals_name_the_parameter():
    with pytest.raises(SettingsError, match="gradient of 'w' is int64"):
        gl.inspect({"w": np.array([1])})
    with pytest.raises(SettingsError, match="gradient of 'w' is complex64"):
        gl.inspect({"w": np.zeros(1, np.complex64)})


def test_a_step_that_raised_leaves_no_loss_behind():
    scaler, weights = gl.Scaler("static:1"), {"w": np.zeros(1, np.float32)}
    scaler.scale(math.nan)
    with pytest.raises(SettingsError):
        scaler.step(weights, {"w": np.array([1])}, sgd)
    scaler.scale(1.0)
    assert scaler.step(weights, {"w": np.float32([1.0])}, sgd).stepped

"""A run that only skips is stopped."""

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl


def test_floor_warns_where_asked():
    scaler = gl.Scaler("backoff:init_scale=8,min_scale=8", on_floor="warn")
    with pytest.warns(
        UserWarning, match=r"at the smallest scale, 2\^3.*First non-finite gradient: w"
    ):
        scaler.step({"w": np.ones(1)}, {"w": np.float16([np.inf])}, sgd)

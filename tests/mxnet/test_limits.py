"""A run that only skips is stopped."""

import pytest
from helpers.mxnet import (
    INF,
    parameters,
    sgd,
    step,
)

import gradlift.mxnet as gl
from gradlift import Verdict
from gradlift.errors import TrainingHalted


def test_limits():
    trainer = sgd(parameters())
    gl.init_trainer(trainer, "dynamic:init_scale=4,min_scale=4", on_floor="warn")
    with pytest.warns(UserWarning, match=r"at the smallest scale, 2\^2: .* gradient: b") as warned:
        step(gl, trainer, spoil=INF)
    assert not warned[0].filename.startswith(gl.__path__[0])
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, max_consecutive_skips=1)
    step(gl, trainer, spoil=INF)
    with pytest.raises(TrainingHalted, match=r"2 steps in a row .* First non-finite gradient: b"):
        step(gl, trainer, spoil=INF)
    assert (scaler.result.verdict, scaler.steps) == (Verdict.HALT, 2)

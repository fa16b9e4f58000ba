"""The NumPy adapter against the suite that every adapter passes."""

import numpy as np
import pytest
from conformance import exact
from conformance.suite import *  # noqa: F403

import gradlift.numpy as gl


class NumpyDriver:
    def __init__(self, rule, **limits):
        self.scaler = gl.Scaler(rule, **limits)
        self.params = {"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}

    def step(self, loss, grads):
        self.scaler.scale(loss)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.float32(self.scaler.get_scale())
            scaled = {n: np.float16(g * scale) for n, g in grads.items()}
        result = self.scaler.step(self.params, scaled, self.sgd)
        return result.stepped, result.cause, self.scaler.get_scale(), self.params

    def sgd(self, params, grads):
        for name, g in grads.items():
            params[name] -= g


@pytest.fixture
def Driver():
    return NumpyDriver


@pytest.mark.parametrize("rule", exact.EVERY)
def test_rules_give_the_same_bits(rule):
    exact.check(rule, np, lambda x, kind: np.asarray(x, kind))

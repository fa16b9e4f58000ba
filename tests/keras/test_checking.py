"""What is used is what is checked: every element, every format, every layout."""

import math

import keras
import numpy as np
import pytest
from helpers.keras import (
    LOSS_SEEN,
    NAN,
    SGD,
    fit,
    lifted,
    line,
    variable,
)
from keras import ops

from gradlift import read_journal
from gradlift.keras import LossScaleOptimizer, ScaleLogger


# Numbers at the edge
@pytest.mark.parametrize(
    ("rule", "cases"),
    [
        (
            "static:1",
            [
                ([3e19, -4e19], 5e19),  # the squares overflow, the numbers do not
                ([3e-30, 4e-30], 5e-30),  # the squares vanish
                ([3e38, 1.0], 3e38),
                ([0.0, 0.0], 0.0),
            ],
        ),
        ("static:2^40", [([3e-30, 4e-30], 5e-30 * 2.0**-40)]),
        (
            "static:2^-10",
            [
                ([1e36, 1.0], None),  # finite as scaled, not when unscaled
                ([1e34, 1.0], 1e34 * 2.0**10),
            ],
        ),
    ],
)
def test_what_is_used_is_what_is_checked(rule, cases):
    w = variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(0.0), rule=rule)
    optimizer.build([w])
    for scaled, norm in cases:
        optimizer.scale_loss(np.float32(1))
        optimizer.apply([ops.convert_to_tensor(np.float32(scaled))], [w])
        result = optimizer.result
        assert result.stepped is (norm is not None)
        if norm is not None:
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert np.isfinite(w.numpy()).all()


def test_magnitudes_are_taken_as_scaled(tmp_path):
    model = line(lifted(rule="auto:cautious,init_scale=2^8"), inputs=2)
    fit(model, [3, 4], [NAN, 1], callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    clean, bad = read_journal(tmp_path / "run.jsonl").steps
    assert (clean.amax, clean.norm) == (4 * 256, 5)
    assert math.isnan(bad.norm)
    assert clean.loss == 0 if LOSS_SEEN else math.isnan(clean.loss)


def test_empty_and_half_gradients():
    a, b = keras.Variable(np.zeros((0, 3), np.float32)), variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.build([a, b])
    for g, stepped in ([3, 4], True), ([np.inf, 0], False):
        optimizer.scale_loss(np.float32(1))
        half = ops.cast(ops.convert_to_tensor(np.float32(g)) * 8, "float16")
        optimizer.apply([ops.zeros((0, 3)), half], [a, b])
        assert optimizer.result.stepped is stepped
    assert b.numpy().tolist() == [-3, -4]

"""What is used is what is checked: every element, every format, every layout."""

import math

import keras
import numpy as np
import pytest
from helpers.keras import (
    LOSS_SEEN,
    NAN,
    PLAIN,
    SGD,
    fit,
    lifted,
    line,
    variable,
)
from keras import ops

from gradlift import Cause, read_journal
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


# Variables that a step overwrites with their gradient, such as float8's histories


def history(*values):
    held = keras.Variable(np.float32(values), name="history")
    held.overwrite_with_gradient = True
    return held


def overwritten(optimizer, weight, held, gradient, value):
    """One step: a true gradient (None: no gradient), and a new history as it is."""
    optimizer.scale_loss(np.float32(1))
    if gradient is not None:
        gradient = ops.convert_to_tensor(np.float32([gradient]) * optimizer.get_scale())
    optimizer.apply([gradient, ops.convert_to_tensor(np.float32([value]))], [weight, held])
    return optimizer.result


@pytest.mark.parametrize("bad", [math.inf, NAN])
@pytest.mark.parametrize("gradient", [2.0, None])
@pytest.mark.parametrize("drop", ["micro-batch", "window"])
def test_an_overflow_that_shows_only_in_a_history(gradient, bad, drop):
    weight, held = keras.Variable(np.zeros(1, np.float32), name="w"), history(5.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8", drop=drop)
    optimizer.build([weight, held])
    result = overwritten(optimizer, weight, held, gradient, bad)
    assert (result.stepped, result.cause) == (False, Cause.OVERFLOW)
    assert result.culprits == (held.path,)
    assert result.culprits[0].kind == ("inf" if bad == math.inf else "nan")
    assert optimizer.get_scale() == 4.0
    assert (weight.numpy().tolist(), held.numpy().tolist()) == ([0.0], [5.0])
    assert overwritten(optimizer, weight, held, gradient, 7.0).stepped
    assert (weight.numpy().tolist(), held.numpy().tolist()) == ([-(gradient or 0.0)], [7.0])


def test_a_history_is_no_part_of_the_norm_and_carries_no_scale():
    weight, held = keras.Variable(np.zeros(1, np.float32), name="w"), history(5.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="auto:init_scale=8")
    optimizer.build([weight, held])
    result = overwritten(optimizer, weight, held, 2.0, 100.0)
    assert result.grad_norm == 2.0
    assert held.numpy().tolist() == [100.0]
    assert overwritten(optimizer, weight, held, None, 300.0).grad_norm == 0.0
    assert held.numpy().tolist() == [300.0]


def test_a_history_unscaled_by_hand():
    weight, held = keras.Variable(np.zeros(1, np.float32), name="w"), history(5.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.build([weight, held])
    for value, stepped in ((3.0, True), (math.inf, False)):
        optimizer.scale_loss(np.float32(1))
        given = [ops.convert_to_tensor(np.float32([v])) for v in (16.0, value)]
        true = optimizer.get_unscaled_gradients(given)
        assert [float(ops.convert_to_numpy(g)[0]) for g in true] == [2.0, value]
        optimizer.apply(true, [weight, held])
        assert optimizer.result.stepped is stepped
    assert (weight.numpy().tolist(), held.numpy().tolist()) == ([-2.0], [3.0])


def test_a_step_of_a_history_alone_needs_no_scaled_loss(recwarn):
    held = history(5.0)
    optimizer = LossScaleOptimizer(SGD(1.0))
    optimizer.apply([ops.convert_to_tensor(np.float32([7.0]))], [held])
    assert held.numpy().tolist() == [7.0]
    assert [str(w.message) for w in recwarn if "scale_loss" in str(w.message)] == []


def float8(kind):
    """A float8 layer whose kernel's gradients stay finite while the gradients of its outputs
    overflow; what remains of it after `fit`."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(4, dtype="mixed_float16", use_bias=False)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1, dtype="float32")])
    layer.quantize("float8")
    optimizer = kind(SGD(1e-3), initial_scale=2.0**22)
    model.compile(optimizer, "mse", **PLAIN)
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32") * 2.0**-8
    model.fit(x, np.ones((64, 1), "float32"), batch_size=8, shuffle=False, verbose=0)
    scale = float(ops.convert_to_numpy(optimizer.dynamic_scale.value))
    held = [v for v in model.trainable_variables if getattr(v, "overwrite_with_gradient", False)]
    return scale, len(held), [ops.convert_to_numpy(v.value).tolist() for v in held]


def test_a_float8_layer_in_fit_ends_where_it_ends_with_keras_own():
    scale, variables, held = float8(LossScaleOptimizer)
    assert (scale, variables, held) == float8(keras.optimizers.LossScaleOptimizer)
    assert scale < 2.0**22
    assert variables == 6

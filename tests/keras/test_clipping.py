"""Clipping measures true gradients."""

import numpy as np
import pytest
from helpers.keras import (
    SGD,
    fit,
    lifted,
    line,
    scaled,
    started,
    step,
    variable,
    weights,
)
from keras import ops

from gradlift import Cause
from gradlift.keras import LossScaleOptimizer


@pytest.mark.parametrize(
    ("clip", "moved"),
    [
        ({"clipnorm": 1.0}, [0.6, 0.8, 1.0]),
        ({"global_clipnorm": 6.5}, [1.5, 2.0, 6.0]),
        ({"clipvalue": 3.5}, [3.0, 3.5, 3.5]),
    ],
    ids=str,
)
def test_clipping_sees_true_gradients(clip, moved):
    a, b = variable(0, 0), variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0, **clip), rule="static:2^10")
    optimizer.build([a, b])
    result = step(optimizer, [a, b], [3, 4], [12])
    assert result.grad_norm == 13.0
    np.testing.assert_allclose(-np.concatenate([a.numpy(), b.numpy()]), moved, rtol=1e-6)


# tf.keras' names, on every backend
def test_gradients_unscaled_by_hand():
    w = variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8,growth_interval=1")
    for expected in ([-1.0, -1.0], [-2.0, -2.0]):
        scale = float(optimizer.loss_scale)
        assert float(optimizer.get_scaled_loss(np.float32(0.5))) == 0.5 * scale
        scaled = [ops.convert_to_tensor(np.float32([3 * scale, 4 * scale]))]
        (true,) = optimizer.get_unscaled_gradients(scaled)
        assert ops.convert_to_numpy(true).tolist() == [3, 4]
        optimizer.apply_gradients([(ops.clip(true, -1, 1), w)])
        assert w.numpy().tolist() == expected
    assert float(optimizer.loss_scale) == 32
    assert int(optimizer.dynamic_counter) == 0
    assert optimizer.result.grad_norm == 5  # of what backward gave


def test_a_clip_by_hand_does_not_hide_an_overflow():
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.scale_loss(np.float32(1))
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor(np.float32([np.inf]))])
    optimizer.apply_gradients([(ops.clip(true, -1, 1), w)])
    assert optimizer.result.cause is Cause.OVERFLOW
    assert w.numpy().tolist() == [0]
    assert float(optimizer.loss_scale) == 4


def test_by_hand_is_for_one_step():
    """After a loop of one's own, `fit` unscales again."""
    optimizer = lifted(rule="static:8")
    model = line(optimizer)
    optimizer.scale_loss(np.float32(1))
    scaled = [ops.convert_to_tensor(np.float32([[8]]))]
    true = optimizer.get_unscaled_gradients(scaled)
    optimizer.apply_gradients(zip(true, model.trainable_variables))
    assert weights(model) == [-1]
    fit(model, 1, 1)
    assert weights(model) == [-3]


def test_a_clip_of_ones_own_hides_nothing():
    """Scale, norm and culprit are of what came out of backward."""
    optimizer, held = started(3, rule="auto:init_scale=2^8")
    true = optimizer.get_unscaled_gradients(scaled(optimizer, 3.0, 4.0, 0.0))
    optimizer.apply([ops.clip(g, -0.5, 0.5) for g in true], held)
    assert optimizer.result.grad_norm == 5
    assert [v.numpy().tolist() for v in held] == [[-0.5], [-0.5], [0]]
    plain, others = started(3, rule="auto:init_scale=2^8")
    plain.apply(scaled(plain, 3.0, 4.0, 0.0), others)
    assert float(optimizer.loss_scale) == float(plain.loss_scale)
    true = optimizer.get_unscaled_gradients(scaled(optimizer, np.inf, 1.0, 1.0))
    norm = ops.sqrt(sum(ops.sum(g * g) for g in true))
    optimizer.apply([g / norm for g in true], held)  # now each is NaN, or zero
    assert optimizer.result.cause is Cause.OVERFLOW
    assert [c.described for c in optimizer.result.culprits] == ["v0 (inf)"]

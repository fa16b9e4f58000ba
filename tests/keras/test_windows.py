"""What belongs to one step: micro-batches, several losses, several optimizers."""

import keras
import numpy as np
import pytest
from helpers.keras import (
    HUGE,
    NAN,
    SGD,
    WAYS,
    fit,
    lifted,
    line,
    named,
    scaled,
    started,
    step,
    tensor,
    weights,
)

from gradlift.keras import LossScaleOptimizer


@pytest.mark.parametrize(
    ("drop", "moved"),
    [
        ("micro-batch", -(1 + 3) / 2 - (5 + 7) / 2),  # the window waits for one more
        ("window", -(3 + 5) / 2),  # what it had summed up goes as well
    ],
)
@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_a_bad_micro_batch(drop, moved, how):
    optimizer = lifted(SGD(1.0, gradient_accumulation_steps=2), drop=drop)
    model = line(optimizer, **how)
    fit(model, 1, HUGE, 3, 5, 7)
    assert weights(model) == [moved]
    assert int(optimizer.iterations) == (2 if drop == "micro-batch" else 1)
    assert optimizer.skipped_steps == 1


def test_a_window_of_several_optimizers():
    a, b = named("a"), named("b")
    inner = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(1.0, gradient_accumulation_steps=2),
            {"b": SGD(1.0, gradient_accumulation_steps=4)},
        )
    )
    optimizer = LossScaleOptimizer(inner, rule="static:8", drop="window")
    optimizer.build([a, b])
    for g in (1, NAN, 3, 5, 7, 9):
        step(optimizer, [a, b], [g], [g])
    assert a.numpy().tolist() == [-(3 + 5) / 2 - (7 + 9) / 2]
    assert b.numpy().tolist() == [-(3 + 5 + 7 + 9) / 4]


def test_gradients_unscaled_only_to_be_looked_at():
    """Their step never came: the next one takes scaled gradients as ever."""
    optimizer, (w,) = started()
    optimizer.get_unscaled_gradients(scaled(optimizer, 1.0))
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert w.numpy().tolist() == [-1]
    assert optimizer.result.grad_norm == 1


def test_a_non_finite_loss_that_was_left_out_changes_no_later_step():
    optimizer, (w,) = started()
    optimizer.scale_loss(tensor(np.nan)[0])  # if not finite: continue
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert optimizer.result.stepped
    optimizer.get_unscaled_gradients(scaled(optimizer, np.inf))
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert optimizer.result.stepped
    assert w.numpy().tolist() == [-2]

"""The scale on its way: into the loss, out of the gradients, and where it goes next."""

import math

import keras
import numpy as np
import pytest
from helpers.keras import (
    BACKEND,
    HUGE,
    NAN,
    PLAIN,
    SGD,
    Adam,
    AdamW,
    fit,
    lifted,
    line,
    output,
    started,
    tensor,
    variable,
    weights,
)
from keras import ops

from gradlift import Cause, read_journal
from gradlift.errors import MisuseError
from gradlift.keras import LossScaleOptimizer, ScaleLogger


def test_the_scale_grows_and_gradients_stay_true():
    """The loss is multiplied by the scale of its own step, and divided by the same one."""
    optimizer = lifted(rule="dynamic:init_scale=2,growth_interval=1")
    model = line(optimizer)
    fit(model, *[1.0] * 6)
    assert weights(model) == [-6.0]
    assert float(optimizer.dynamic_scale.value) == 2.0**7


def test_scaling_saves_what_float16_loses():
    def tiny(y, predicted):
        return output(y, predicted) * 2.0**-14

    rows = [2.0**-12, 2.0**-14]  # gradients of 2^-26 and 2^-28: nothing, in float16
    lost = line(SGD(1.0), loss=tiny, auto_scale_loss=False)
    fit(lost, *rows)
    assert weights(lost) == [0.0]
    model = line(lifted(rule="static:2^14"), loss=tiny)
    fit(model, *rows)
    assert weights(model) == [-(2.0**-26) - 2.0**-28]


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.usefixtures("mixed_float16")
def test_a_mixed_model_is_never_wrapped_twice(auto):
    plain = line(SGD(1.0))
    assert isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)  # that is the danger
    optimizer = lifted()
    model = line(optimizer, auto_scale_loss=auto)
    assert model.optimizer is optimizer
    assert type(optimizer.inner_optimizer).__name__ == "SGD"
    fit(model, 0.5, HUGE, 0.25)
    assert weights(model) == [-0.75]


@pytest.mark.usefixtures("mixed_float16")
def test_a_mixed_network_learns():
    """A real one: the rule finds its scale, and the loss falls to a tenth."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = lifted(AdamW(3e-2), rule="auto")
    model.compile(optimizer, "mse", **PLAIN)
    x = np.random.default_rng(0).standard_normal((256, 8), np.float32)
    y = x[:, :1] - 2 * x[:, 1:2]
    told = model.fit(x, y, epochs=8, verbose=0, callbacks=[ScaleLogger()]).history
    assert told["loss"][-1] < told["loss"][0] / 10
    assert told["loss_scale"][-1] > 2.0**8
    assert sum(told["skipped"]) == optimizer.skipped_steps <= 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_train_on_batch_and_evaluate():
    optimizer = lifted()
    model = line(optimizer)
    for x in (0.5, HUGE, 0.25):
        model.train_on_batch(np.float32([[x]]), np.float32([[0]]))
    assert weights(model) == [-0.75]
    model.evaluate(np.float32([[1]]), np.float32([[0]]), verbose=0)
    assert optimizer.record.steps == 3
    assert optimizer.result.cause is Cause.NONE


def test_fit_with_validation_goes_on_where_it_was():
    optimizer = lifted(rule="static:8")
    model = line(optimizer)
    valid = (np.float32([[1], [1]]), np.float32([[0], [0]]))
    logger = ScaleLogger(every=2)
    told = fit(model, 0.5, NAN, 0.5, epochs=2, validation_data=valid, callbacks=[logger])
    assert told.history["skipped"] == [1, 1]
    assert told.history["val_loss"] == [-1.0, -2.0]
    assert weights(model) == [-2.0]


class HalfLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.cast(ops.mean(y_pred), "float16")


def test_a_float16_loss_carries_two_to_the_fifteen(tmp_path):
    """Backward casts the scale itself to float16: one of 2^20 would be inf."""
    optimizer = lifted(rule="dynamic:init_scale=2^20,growth_interval=2")
    model = HalfLoss(line(optimizer).layers)
    model.compile(optimizer, **PLAIN)
    fit(model, 0.5, 0.25, 0.5, 0.25, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    assert weights(model) == [-1.5]
    assert optimizer.skipped_steps == 0
    assert optimizer.result.scale == 2.0**15
    assert [note.code for note in optimizer.result.notes] == ["half-loss"]
    assert str(optimizer.result).endswith(
        "norm 0.25; loss computed in float16: its scale is capped at 2^15"
    )
    steps = read_journal(tmp_path / "run.jsonl").steps
    assert [(s.scale, s.next_scale) for s in steps] == [(2.0**15, 2.0**15)] * 4
    (note,) = read_journal(tmp_path / "run.jsonl").events
    assert (note.what, note.step, note.detail["code"]) == ("note", 0, "half-loss")


def test_the_scaled_loss_is_wide():
    """4 * 2^15 is inf in float16; and whoever prints it should see a number."""
    optimizer = lifted(rule="static:2^15")
    scaled = optimizer.scale_loss(ops.convert_to_tensor(np.float16(4)))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 2.0**17


def test_off_checks_nothing():
    optimizer = lifted(rule="off")
    loss = ops.convert_to_tensor(np.float32(3))
    assert optimizer.scale_loss(loss) is loss
    model = line(optimizer)
    told = fit(model, 0.5, NAN, callbacks=[ScaleLogger()])
    assert math.isnan(weights(model)[0])
    assert list(told.history) == ["loss"]
    assert not optimizer.dynamic


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras has no stateless_apply there")
def test_values_in_values_out():
    w = variable(1, 2)
    ours = LossScaleOptimizer(Adam(0.5), initial_scale=8.0)
    keras_own = keras.optimizers.LossScaleOptimizer(Adam(0.5), initial_scale=8.0)
    ended = []
    for optimizer in (ours, keras_own):
        optimizer.build([w])
        optimizer.scale_loss(np.float32(1))
        held = [ops.copy(v.value) for v in optimizer.variables]
        for g in ([8, 16], [8, np.inf]):
            grads = [ops.convert_to_tensor(np.float32(g))]
            moved, held = optimizer.stateless_apply(held, grads, [ops.copy(w.value)])
            assert len(held) == len(optimizer.variables)
        where = [i for i, v in enumerate(optimizer.variables) if v is optimizer.dynamic_scale]
        ended.append((ops.convert_to_numpy(moved[0]).tolist(), float(held[where[0]])))
    assert ended[0] == ended[1] == ([1, 2], 4.0)


def test_a_half_loss_and_a_full_one_carry_different_scales():
    optimizer, _ = started(initial_scale=2**17)
    optimizer.scale_loss(tensor(1.0, dtype=np.float16)[0])
    with pytest.raises(MisuseError, match="a float16 loss and a float32 one"):
        optimizer.scale_loss(tensor(1.0)[0])

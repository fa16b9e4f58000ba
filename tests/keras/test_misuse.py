"""Calls that cannot work are told, with what to do instead."""

import keras
import numpy as np
import pytest
from helpers.keras import BACKEND, fit, lifted, line, weights
from keras import ops

from gradlift.errors import MisuseError, SettingsError, SettingsTypeError
from gradlift.keras import LossScaleOptimizer, ScaleLogger

SGD = keras.optimizers.SGD


def tensor(*values):
    return ops.convert_to_tensor(np.array(values, np.float32))


def started(rule="dynamic:init_scale=8", **settings):
    w = keras.Variable(np.zeros(1, np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), rule=rule, **settings)
    optimizer.build([w])
    return optimizer, w


@pytest.mark.parametrize("outer", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_wrapped_twice(outer):
    with pytest.raises(SettingsTypeError, match=r"LossScaleOptimizer already.* wrap its inner_opt"):
        LossScaleOptimizer(outer(SGD(0.1)))


def test_an_inner_optimizer_has_one_wrapper():
    inner = SGD(0.1)
    with pytest.raises(SettingsError, match="dynamic=False wants"):
        LossScaleOptimizer(inner, dynamic=False)
    LossScaleOptimizer(inner)  # one that failed does not count
    with pytest.raises(SettingsError, match=r"wraps this inner optimizer already.*from_config\("):
        LossScaleOptimizer(inner)
    LossScaleOptimizer(type(inner).from_config(inner.get_config()))
    LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(SGD(0.1)).inner_optimizer)


def test_what_is_wrapped_is_an_optimizer():
    with pytest.raises(SettingsTypeError, match=r"expected a keras\.optimizers\.Optimizer"):
        LossScaleOptimizer("adam")


def test_arguments_at_the_place_that_tf_keras_had_for_others():
    """There the second one is `dynamic`: True would be a scale of 1."""
    for value in (True, False, "dynamic", "auto"):
        with pytest.raises(SettingsTypeError, match=r"dynamic, tf\.keras' second argument"):
            LossScaleOptimizer(SGD(0.1), value)
    with pytest.raises(SettingsTypeError, match="dynamic is 'x', expected True or False"):
        LossScaleOptimizer(SGD(0.1), dynamic="x")
    assert {SettingsError, TypeError} <= set(SettingsTypeError.__mro__)


@pytest.mark.parametrize(
    "clip", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1.0}, {"use_ema": True}]
)
def test_settings_of_the_inner_optimizer(clip):
    (name,) = clip
    with pytest.raises(ValueError, match=f"set `{name}` on the `inner_optimizer`"):
        LossScaleOptimizer(SGD(0.1), **clip)


def test_settings_that_contradict():
    for given in ({"initial_scale": 8.0}, {"dynamic_growth_steps": 3}, {"dynamic": False}):
        with pytest.raises(
            SettingsError, match=r"write them into it, as in rule='keras:init_scale"
        ):
            LossScaleOptimizer(SGD(0.1), rule="auto", **given)
    with pytest.raises(SettingsError, match="dynamic=False wants initial_scale="):
        LossScaleOptimizer(SGD(0.1), dynamic=False)
    with pytest.raises(SettingsError, match="dynamic_growth_steps is 3 though dynamic=False"):
        LossScaleOptimizer(SGD(0.1), dynamic=False, initial_scale=8, dynamic_growth_steps=3)
    with pytest.raises(SettingsError, match="expected 'micro-batch' or 'window'"):
        LossScaleOptimizer(SGD(0.1), drop="batch")
    with pytest.raises(SettingsError, match="expected 'hold', 'warn' or 'raise'"):
        LossScaleOptimizer(SGD(0.1), on_floor="explode")
    with pytest.raises(SettingsError, match="did you mean 'dynamic'"):
        LossScaleOptimizer(SGD(0.1), rule="dinamic")
    with pytest.raises(SettingsError, match="take 512 or 2"):
        LossScaleOptimizer(SGD(0.1), rule="static:1000")
    with pytest.raises(SettingsError, match="finite number above 0"):
        LossScaleOptimizer(SGD(0.1), initial_scale=float("inf"))


def test_a_second_scale_is_taken_out():
    inner = SGD(1.0, loss_scale_factor=16.0)
    with pytest.warns(UserWarning, match="taken out.* rule='static:16'"):
        optimizer = LossScaleOptimizer(inner, rule="static:8")
    model = line(optimizer)
    fit(model, 0.5)
    assert weights(model) == [-0.5]


@pytest.mark.parametrize("rule", ["dynamic", "static:8", "auto"])
def test_a_loss_that_was_never_scaled(rule):
    optimizer, w = started(rule)
    with pytest.warns(UserWarning, match=r"Differentiate optimizer\.scale_loss\(loss\), or give"):
        optimizer.apply([tensor(1)], [w])


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_needs_no_warning():
    for rule in ("off", "static:1"):  # nothing is divided
        optimizer, w = started(rule)
        optimizer.apply([tensor(1)], [w])
        assert w.numpy().tolist() == [-1]
    optimizer, w = started()
    optimizer.scale_loss(tensor(1))
    optimizer.apply([tensor(1)], [w])
    model = line(lifted())
    fit(model, 0.5)  # fit scales by itself


def test_gradients_unscaled_twice():
    optimizer, _ = started()
    optimizer.scale_loss(tensor(1))
    true = optimizer.get_unscaled_gradients([tensor(8)])
    with pytest.raises(MisuseError, match="has unscaled before: call it once a step"):
        optimizer.get_unscaled_gradients(true)


def test_scaled_gradients_applied_after_all():
    optimizer, w = started()
    optimizer.scale_loss(tensor(1))
    scaled = [tensor(8)]
    optimizer.get_unscaled_gradients(scaled)
    with pytest.raises(MisuseError, match="apply what it returned"):
        optimizer.apply(scaled, [w])
    assert w.numpy().tolist() == [0]


def test_gradients_and_variables_that_do_not_match():
    optimizer, w = started()
    other = keras.Variable(np.zeros(1, np.float32))
    optimizer.scale_loss(tensor(1))
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tensor(8)], [other])
    with pytest.raises(MisuseError, match="2 gradients for 1 variables"):
        optimizer.apply([tensor(8), tensor(8)], [w])
    with pytest.raises(MisuseError, match=r"2 gradients for 1 variables.*None where there is none"):
        optimizer.apply([tensor(8), tensor(8)])
    assert optimizer.record.steps == 0
    optimizer.apply([tensor(8)])
    assert w.numpy().tolist() == [-1]


def test_before_it_is_built():
    optimizer = LossScaleOptimizer(SGD(0.1))
    with pytest.raises(MisuseError, match=r"call build\(model\.trainable_variables\) first"):
        optimizer.apply([tensor(1)])
    if BACKEND == "jax":
        with pytest.raises(MisuseError, match="before build"):
            optimizer.stateless_apply([], [], [])


def test_a_loss_that_is_no_number():
    optimizer, _ = started()
    with pytest.raises(MisuseError, match="the loss is int32"):
        optimizer.scale_loss(ops.convert_to_tensor(3, "int32"))


def test_a_logger_without_its_optimizer():
    model = line(SGD(0.1))
    with pytest.raises(MisuseError, match=r"is SGD: compile it with LossScaleOptimizer"):
        fit(model, 1.0, callbacks=[ScaleLogger()])

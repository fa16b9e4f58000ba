"""tf.keras' names and the loops written for them: what its own tests ask, in our own words.

tf_keras 2.17's loss_scale_optimizer_test.py, as far as Keras 3 has what they ask for. Loops by
`minimize`, which Keras 3 does not have, are written out with a tape.
"""

import contextlib

import keras
import numpy as np
import pytest
from helpers.keras import BACKEND, SGD, Adam, step, tensor, variable
from keras import ops

from gradlift import Cause
from gradlift.keras import LossScaleOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:.*is not a power of two:UserWarning")


def number(value):
    return float(ops.convert_to_numpy(value))


def fixed(scale=2.0, inner=None):
    return LossScaleOptimizer(inner or SGD(1.0), dynamic=False, initial_scale=scale)


def test_a_fixed_scale_has_no_counter_and_no_growth():
    """Built or not."""
    optimizer = fixed()
    for _ in range(2):
        assert optimizer.dynamic is False
        assert (optimizer.dynamic_counter, optimizer.dynamic_growth_steps) == (None, None)
        assert (optimizer.initial_scale, number(optimizer.loss_scale)) == (2.0, 2.0)
        optimizer.build([variable(1.0)])


@pytest.mark.parametrize("scale", [10, 10.0, np.float32(10)])
def test_a_fixed_scale_that_is_no_power_of_two(scale):
    """Warned of, kept, and taken out of the gradients."""
    with pytest.warns(UserWarning, match=r"initial_scale=10.0 is not a power of two"):
        optimizer = fixed(scale)
    assert (optimizer.dynamic, optimizer.dynamic_counter) == (False, None)
    held = variable(5.0)
    optimizer.build([held])
    for gradient in (1.0, np.inf, 2.0):
        assert step(optimizer, [held], [gradient]).scale == 10.0
    assert held.numpy().tolist() == [2.0]
    assert optimizer.skipped_steps == 1
    assert LossScaleOptimizer.from_config(optimizer.get_config()).rule == optimizer.rule


def test_defaults():
    optimizer = LossScaleOptimizer(SGD(1.0))
    assert (optimizer.dynamic, optimizer.dynamic_counter) == (True, 0)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2**15, 2000)
    assert number(optimizer.loss_scale) == 2**15
    assert ops.is_tensor(optimizer.loss_scale)
    short = LossScaleOptimizer(SGD(1.0), initial_scale=2, dynamic_growth_steps=3.0)
    assert (short.initial_scale, type(short.initial_scale)) == (2.0, float)
    assert (short.dynamic_growth_steps, type(short.dynamic_growth_steps)) == (3, int)


def test_a_rule_that_does_not_count_clean_steps_claims_no_growth_steps():
    assert LossScaleOptimizer(SGD(1.0), rule="auto").dynamic_growth_steps is None
    assert LossScaleOptimizer(SGD(1.0), rule="dynamic").dynamic_growth_steps == 2000


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_loss_and_a_function_that_returns_one(kind):
    optimizer, loss = fixed(), tensor(5.0, dtype=kind)[0]
    assert number(optimizer.get_scaled_loss(loss)) == 10.0
    scaled = optimizer.get_scaled_loss(lambda: loss)
    assert callable(scaled)
    assert number(scaled()) == 10.0


def test_a_function_is_scaled_when_it_is_called():
    held = variable(0.0)
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
    optimizer.build([held])
    scaled = optimizer.get_scaled_loss(lambda: tensor(1.0)[0])
    assert number(scaled()) == 8.0
    optimizer.apply([tensor(np.inf)], [held])
    assert number(scaled()) == 4.0


def test_unscaled_gradients_before_the_optimizer_is_built():
    true = fixed().get_unscaled_gradients([tensor(3.0), None, tensor(-4.0, dtype="float16")])
    assert true[1] is None
    assert [number(g[0]) for g in (true[0], true[2])] == [1.5, -2.0]


def test_settings_that_a_fixed_scale_refuses():
    with pytest.raises(ValueError, match="dynamic=False wants initial_scale="):
        LossScaleOptimizer(SGD(1.0), dynamic=False)
    with pytest.raises(ValueError, match="dynamic_growth_steps is 2 though dynamic=False"):
        LossScaleOptimizer(SGD(1.0), dynamic=False, initial_scale=1, dynamic_growth_steps=2)
    with pytest.raises(TypeError, match="dynamic is 'dynamic', expected True or False"):
        LossScaleOptimizer(SGD(1.0), dynamic="dynamic")


def test_one_optimizer_has_one_scale():
    inner = SGD(1.0)
    outer = LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match="LossScaleOptimizer already"):
        LossScaleOptimizer(outer)
    with pytest.raises(ValueError, match="wraps this inner optimizer already"):
        LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match=r"inner_optimizer is 1, expected"):
        LossScaleOptimizer(1)


def test_the_learning_rate_is_the_inner_optimizers_and_nothing_else_is():
    inner = Adam(1.0, beta_1=0.5)
    optimizer = LossScaleOptimizer(inner)
    optimizer.learning_rate = 0.005
    assert number(inner.learning_rate) == number(optimizer.learning_rate) == np.float32(0.005)
    with pytest.raises(AttributeError, match="beta_1"):
        _ = optimizer.beta_1
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 2.0


def test_the_learning_rate_of_a_wrapper_inside():
    class Wrapper(SGD):
        def __init__(self):
            super().__init__(9.0)
            self.inner_optimizer = SGD(1.0)

        @property
        def learning_rate(self):
            return self.inner_optimizer.learning_rate

        @learning_rate.setter
        def learning_rate(self, value):
            self.inner_optimizer.learning_rate = value

    optimizer = LossScaleOptimizer(Wrapper())
    assert number(optimizer.learning_rate) == 1.0
    optimizer.learning_rate = 2.0
    assert number(optimizer.inner_optimizer.inner_optimizer.learning_rate) == 2.0


def test_iterations_count_the_steps_that_were_applied():
    """tf.keras counts the skipped ones as well; Keras 3 and gradlift do not."""
    held = variable(5.0)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    optimizer = LossScaleOptimizer(SGD(schedule), initial_scale=8.0)
    optimizer.build([held])
    seen = []
    for gradient in (1.0, np.nan, np.inf, 1.0, 1.0):
        step(optimizer, [held], [gradient])
        seen.append(int(optimizer.iterations))
    assert seen == [1, 1, 1, 2, 3]
    assert held.numpy().tolist() == [5.0 - 1.0 - 1.0 - 0.5]
    assert optimizer.record.steps == int(optimizer.iterations) + optimizer.skipped_steps


@pytest.mark.parametrize("dynamic", [True, False])
def test_configs(dynamic):
    """A config with tf.keras' keys is understood; ours makes an equal optimizer."""
    inner = keras.saving.serialize_keras_object(SGD(2.0, momentum=0.5))
    config = {"inner_optimizer": inner, "initial_scale": 2, "dynamic": dynamic}
    config["dynamic_growth_steps"] = 3 if dynamic else None
    first = LossScaleOptimizer.from_config(config)
    assert "inner_optimizer" in config  # it is the caller's
    second = LossScaleOptimizer.from_config(first.get_config())
    third = keras.optimizers.deserialize(keras.optimizers.serialize(second))
    for optimizer in (first, second, third):
        assert number(optimizer.learning_rate) == 2.0
        assert optimizer.inner_optimizer.momentum == 0.5
        assert (optimizer.dynamic, optimizer.initial_scale) == (dynamic, 2.0)
        assert optimizer.dynamic_growth_steps == (3 if dynamic else None)
        held = variable(5.0)
        optimizer.build([held])
        step(optimizer, [held], [1.0])
        assert held.numpy().tolist() == [3.0]
        counter = optimizer.dynamic_counter
        assert (int(counter) if dynamic else counter) == (1 if dynamic else None)


def test_a_custom_inner_optimizer_is_serialized():
    @keras.saving.register_keras_serializable("tf_keras_test")
    class Mine(SGD):
        mine = 123

    optimizer = LossScaleOptimizer(Mine(2.0, momentum=0.5), 2.0, 3)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert (type(again.inner_optimizer), again.inner_optimizer.mine) == (Mine, 123)
    assert (again.initial_scale, again.dynamic_growth_steps) == (2.0, 3)


def test_a_forgotten_call_is_warned_of():
    said = "gradients came before any loss went through scale_loss"
    for forgetful in (
        lambda o, v: o.apply_gradients([(tensor(1.0), v)]),
        lambda o, v: o.apply_gradients([(o.get_unscaled_gradients([tensor(1.0)])[0], v)]),
    ):
        optimizer = LossScaleOptimizer(SGD(1.0))
        with pytest.warns(UserWarning, match=said):
            forgetful(optimizer, variable(1.0))


@pytest.mark.filterwarnings("error:gradients came before")
def test_no_call_forgotten():
    held = variable(1.0)
    optimizer = LossScaleOptimizer(SGD(1.0))
    optimizer.get_scaled_loss(tensor(1.0)[0])
    true = optimizer.get_unscaled_gradients([tensor(2.0**15)])
    optimizer.apply_gradients(zip(true, [held]))
    assert held.numpy().tolist() == [0.0]


# Loops, eager and in a function, with and without a strategy


def places():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    for strategy in (tf.distribute.get_strategy, lambda: tf.distribute.MirroredStrategy(["CPU:0"])):
        for compiled in (False, True):
            name = "mirrored" if "Mirrored" in type(strategy()).__name__ else "default"
            yield pytest.param(strategy, compiled, id=f"{name}-{'graph' if compiled else 'eager'}")


in_places = pytest.mark.parametrize(("strategy", "compiled"), list(places()))


class TapeLoop:
    """`minimize`, as it was: tape, scaled loss, true gradients, step."""

    def __init__(self, strategy, compiled, start, make):
        import tensorflow as tf

        self.tf, self.strategy, self.compiled = tf, strategy(), compiled
        with self.strategy.scope():
            self.variable = tf.Variable(start)
            self.optimizer = make()
            self.optimizer.build([self.variable])

    def minimize(self, loss, inside=lambda: contextlib.nullcontext()):
        def one():
            with self.tf.GradientTape() as tape:
                scaled = self.optimizer.get_scaled_loss(lambda: loss(self.variable))()
            scaled = tape.gradient(scaled, [self.variable])
            self.seen = scaled
            true = self.optimizer.get_unscaled_gradients(scaled)
            self.optimizer.apply_gradients(zip(true, [self.variable]))

        run = lambda: self.strategy.run(one)
        with inside():
            (self.tf.function(run) if self.compiled else run)()
        return self.variable.numpy().tolist()

    @property
    def scale(self):
        return number(self.optimizer.loss_scale)


@in_places
def test_the_scale_is_in_the_loss_and_taken_out_again(strategy, compiled):
    loop = TapeLoop(strategy, compiled, [5.0], lambda: fixed(10.0, SGD(2.0)))
    seen = []
    import tensorflow as tf

    @tf.custom_gradient
    def spied(v):
        def grad(up):
            seen.append(up)
            tf.debugging.assert_equal(up, tf.constant([10.0]))
            return up

        return tf.identity(v), grad

    assert loop.minimize(spied) == [3.0]
    assert len(seen) == 1
    assert loop.scale == 10.0


@in_places
def test_a_dynamic_scale_doubles_and_halves(strategy, compiled):
    make = lambda: LossScaleOptimizer(SGD(1.0), initial_scale=2, dynamic_growth_steps=1)
    loop = TapeLoop(strategy, compiled, [1.0, 2.0], make)
    assert loop.minimize(lambda v: v * 2.0) == [-1.0, 0.0]
    assert loop.scale == 4.0
    # Differs: the loss itself is NaN, so the scale is kept. An overflow halves it.
    assert loop.minimize(lambda v: v * float("nan")) == [-1.0, 0.0]
    assert (loop.scale, loop.optimizer.result.cause) == (4.0, Cause.LOSS_NONFINITE)

    tf = loop.tf

    @tf.custom_gradient
    def overflowing(v):
        return tf.reduce_sum(v), lambda up: tf.fill(tf.shape(v), float("inf")) * up

    assert loop.minimize(overflowing) == [-1.0, 0.0]
    assert (loop.scale, loop.optimizer.result.cause) == (2.0, Cause.OVERFLOW)
    assert number(loop.optimizer.iterations) == 1


@in_places
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clips_see_true_gradients_and_hide_no_overflow(strategy, compiled, clip):
    make = lambda: LossScaleOptimizer(
        SGD(2.0, **{clip: 2.0}), initial_scale=2, dynamic_growth_steps=1
    )
    loop = TapeLoop(strategy, compiled, [5.0], make)
    assert loop.minimize(lambda v: v * 4) == [1.0]
    assert loop.scale == 4.0
    setattr(loop.optimizer.inner_optimizer, clip, 3.0)
    assert loop.minimize(lambda v: v * 4) == [-5.0]
    assert loop.scale == 8.0
    assert loop.minimize(lambda v: v * float("inf")) == [-5.0]
    assert not loop.optimizer.result.stepped


@in_places
def test_a_float16_loss(strategy, compiled):
    make = lambda: LossScaleOptimizer(SGD(2.0), initial_scale=2, dynamic_growth_steps=1)
    loop = TapeLoop(strategy, compiled, [5.0], make)
    assert loop.minimize(lambda v: loop.tf.cast(v, "float16")) == [3.0]


@in_places
def test_momentum(strategy, compiled):
    make = lambda: LossScaleOptimizer(
        SGD(1.0, momentum=1.0), initial_scale=2, dynamic_growth_steps=1
    )
    loop = TapeLoop(strategy, compiled, [1.0, 2.0], make)
    assert loop.minimize(lambda v: v) == [0.0, 1.0]
    assert loop.scale == 4.0
    assert loop.minimize(lambda v: v) == [-2.0, -1.0]
    assert loop.scale == 8.0


@in_places
def test_the_inner_optimizer_gets_plain_tensors(strategy, compiled):
    kinds = []

    class Spy(SGD):
        def apply(self, grads, trainable_variables=None):
            kinds.extend(type(g).__name__ for g in grads)
            return super().apply(grads, trainable_variables)

    loop = TapeLoop(strategy, compiled, [5.0], lambda: fixed(1, Spy(1.0)))
    assert loop.minimize(lambda v: v * 2.0) == [3.0]
    assert set(kinds) <= {"EagerTensor", "SymbolicTensor", "Tensor"}
    assert kinds


@in_places
def test_a_checkpoint(strategy, compiled, tmp_path):
    make = lambda: LossScaleOptimizer(
        SGD(1.0, momentum=1.0), initial_scale=1.0, dynamic_growth_steps=2.0
    )
    loop = TapeLoop(strategy, compiled, [2.0], make)
    assert loop.minimize(lambda v: v + 1.0) == [1.0]
    tf = loop.tf
    path = tf.train.Checkpoint(optimizer=loop.optimizer, v=loop.variable).save(
        str(tmp_path / "saved")
    )
    again = TapeLoop(strategy, compiled, [2.0], make)
    checkpoint = tf.train.Checkpoint(optimizer=again.optimizer, v=again.variable)
    for _ in range(2):  # before a step, and after one
        checkpoint.restore(path).assert_consumed()
        assert again.variable.numpy().tolist() == [1.0]
        assert (again.scale, number(again.optimizer.dynamic_counter)) == (1.0, 1)
        assert number(again.optimizer.iterations) == 1
        assert again.minimize(lambda v: v + 1.0) == [-1.0]
        assert again.scale == 2.0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's sparse gradients")
def test_a_sparse_gradient_stays_one():
    import tensorflow as tf

    rows = tf.constant([[4.0, 2.0], [8.0, 5.0]])
    given = tf.IndexedSlices(rows, tf.constant([1, 3]), dense_shape=tf.constant([5, 2]))
    (true,) = fixed().get_unscaled_gradients([given])
    assert isinstance(true, tf.IndexedSlices)
    assert true.values.numpy().tolist() == [[2.0, 1.0], [4.0, 2.5]]

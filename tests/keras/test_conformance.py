"""LossScaleOptimizer against the suite that every adapter passes, as each backend runs it."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from conformance.suite import *  # noqa: F403
from keras import ops

from gradlift import Cause
from gradlift.keras import LossScaleOptimizer, ScaleLogger

BACKEND = keras.backend.backend()


class Stateful:
    """`apply`, called from Python."""

    def __init__(self, rule, journal=None, **limits):
        self.params = {n: keras.Variable(np.ones(k, np.float32)) for n, k in (("a", 4), ("b", 2))}
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), rule=rule, **limits)
        self.optimizer.build(list(self.params.values()))
        self.logger = None
        if journal is not None:
            self.logger = ScaleLogger(journal)
            self.logger.set_model(SimpleNamespace(optimizer=self.optimizer, steps_per_execution=1))
            self.logger.on_train_begin()
            self.logger.on_epoch_begin(0)

    def step(self, loss, grads):
        self.move(np.float32(loss), {n: np.float32(g) for n, g in grads.items()})
        self.optimizer.enforce()
        result = self.result
        params = {n: ops.convert_to_numpy(p.value) for n, p in self.params.items()}
        scale = float(self.optimizer.dynamic_scale.value)
        if result is None:  # the rule is off
            return True, Cause.NONE, scale, params
        return result.stepped, result.cause, scale, params

    @property
    def result(self):
        return self.optimizer.result

    @property
    def skipped_steps(self):
        return self.optimizer.skipped_steps

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, data):
        self.optimizer.load_state_dict(data)

    def close(self):
        if self.logger is not None:
            self.logger.on_train_end()

    def move(self, loss, grads):
        scale = self.scaled(loss)
        grads = [ops.convert_to_tensor(g) * scale for g in grads.values()]
        halves = [ops.cast(ops.cast(g, "float16"), "float32") for g in grads]
        self.optimizer.apply(halves, list(self.params.values()) if halves else None)

    def scaled(self, loss):
        """The scale that came out of `scale_loss`, which must see the loss itself as well."""
        self.optimizer.scale_loss(ops.convert_to_tensor(loss))
        return ops.convert_to_tensor(self.optimizer.loss_scale)


class Function(Stateful):
    """A `tf.function`."""

    jit_compile = False

    def __init__(self, rule, journal=None, **limits):
        import tensorflow as tf

        super().__init__(rule, journal, **limits)
        plain = super().move
        self.compiled = tf.function(
            lambda loss, grads: plain(loss, grads), jit_compile=self.jit_compile
        )

    def move(self, loss, grads):
        import tensorflow as tf

        self.compiled(tf.constant(loss), {n: tf.constant(g) for n, g in grads.items()})


class Compiled(Function):
    jit_compile = True


class Stateless(Stateful):
    """What `fit` does on JAX: values in, values out, in `jit`. The loss is not seen."""

    sees_loss = False

    def __init__(self, rule, journal=None, **limits):
        import jax

        super().__init__(rule, journal, **limits)

        def one(held, weights, grads):
            scale = held[next(i for i, v in enumerate(self.optimizer.variables) if v is own)]
            halves = [(g * scale).astype("float16").astype("float32") for g in grads.values()]
            return self.optimizer.stateless_apply(held, halves, weights)

        own = self.optimizer.dynamic_scale
        self.optimizer.scale_loss(np.float32(1))
        self.compiled = jax.jit(one)

    def move(self, loss, grads):
        variables = list(self.params.values())
        held = [v.value for v in self.optimizer.variables]
        weights, held = self.compiled(held, [v.value for v in variables], grads)
        for variable, value in zip([*variables, *self.optimizer.variables], [*weights, *held]):
            variable.assign(value)


# TensorFlow without a graph is what the stories drive step by step.
DRIVERS = {
    "tensorflow": [Function, Compiled],
    "jax": [Stateful, Stateless],
    "torch": [Stateful],
}


@pytest.fixture(params=DRIVERS[BACKEND], ids=lambda d: d.__name__)
def Driver(request):
    return request.param

"""LossScaleOptimizer against the suites that every adapter passes, as each backend runs it."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from conformance.records import *  # noqa: F403
from conformance.suite import *  # noqa: F403
from keras import ops

from gradlift import Cause
from gradlift.journal import current
from gradlift.keras import LossScaleOptimizer, ScaleLogger

BACKEND = keras.backend.backend()


class Stateful:
    """`apply`, called from Python."""

    adapter = framework = "keras"
    more_facts = {"backend"}
    CANNOT = {
        "all culprits": "the record of a step has room for one",
        "retries": "fit never computes a batch again",
    }

    def __init__(self, rule, journal=None, **limits):
        self.params = {
            n: keras.Variable(np.ones(k, np.float32), name=n) for n, k in (("a", 4), ("b", 2))
        }
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), rule=rule, **limits)
        self.optimizer.build(list(self.params.values()))
        self.logger = None
        if journal is not None or current() is not None:
            self.logger = ScaleLogger(journal)
            self.logger.set_model(SimpleNamespace(optimizer=self.optimizer, steps_per_execution=1))
            self.logger.on_train_begin()
            self.logger.on_epoch_begin(0)

    def step(self, loss, grads):
        return self.window([(loss, grads)])

    def half(self, loss, grads):
        return self.window([(loss, grads)], np.float16)

    def window(self, batches, dtype=np.float32):
        self.move(
            [(dtype(loss), {n: np.float32(grads[n]) for n in grads}) for loss, grads in batches]
        )
        self.optimizer.enforce()
        result = self.result
        params = {n: ops.convert_to_numpy(p.value) for n, p in self.params.items()}
        scale = self.optimizer.get_scale()
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

    def move(self, batches):
        """Gradients as a backward pass in float16 leaves them, added up."""
        total = {}
        for loss, grads in batches:
            scale = self.scaled(loss)
            for n, g in grads.items():
                half = ops.cast(ops.convert_to_tensor(g) * scale, "float16")
                total[n] = total.get(n, 0) + ops.cast(half, "float32")
        self.optimizer.apply(list(total.values()), list(self.params.values()) if total else None)

    def scaled(self, loss):
        """The scale that the loss carries, which `scale_loss` must see itself as well."""
        self.optimizer.scale_loss(ops.convert_to_tensor(loss))
        return self.optimizer._carried(ops.convert_to_tensor(self.optimizer.loss_scale))


class Function(Stateful):
    """A `tf.function`."""

    jit_compile = False

    def __init__(self, rule, journal=None, **limits):
        import tensorflow as tf

        super().__init__(rule, journal, **limits)
        plain = super().move
        self.compiled = tf.function(lambda batches: plain(batches), jit_compile=self.jit_compile)

    def move(self, batches):
        import tensorflow as tf

        self.compiled(tf.nest.map_structure(tf.constant, batches))


class Compiled(Function):
    jit_compile = True


class Stateless(Stateful):
    """What `fit` does on JAX: values in, values out, in `jit`. The loss is not seen."""

    adapter = "keras on jax, in jit"
    sees_loss = False
    CANNOT = {**Stateful.CANNOT, "loss": "JAX keeps no notes of what it traces"}

    def __init__(self, rule, journal=None, **limits):
        super().__init__(rule, journal, **limits)
        self.compiled = {}

    def stateless(self, held, weights, several):
        own = self.optimizer.dynamic_scale
        scale = held[next(i for i, v in enumerate(self.optimizer.variables) if v is own)]
        scale = self.optimizer._carried(scale)
        total = {}
        for grads in several:
            for n, g in grads.items():
                half = (g * scale).astype("float16").astype("float32")
                total[n] = total.get(n, 0) + half
        return self.optimizer.stateless_apply(held, list(total.values()), weights)

    def move(self, batches):
        import jax

        dtype = batches[0][0].dtype
        self.optimizer.scale_loss(np.ones((), dtype))  # what a trace learns of the loss: its type
        if dtype not in self.compiled:
            self.compiled[dtype] = jax.jit(lambda *values: self.stateless(*values))
        variables = list(self.params.values())
        held = [v.value for v in self.optimizer.variables]
        grads = [grads for _, grads in batches]
        weights, held = self.compiled[dtype](held, [v.value for v in variables], grads)
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

"""A straight line whose gradient is its input: what a batch holds is what its step does.

    output = x . w        w starts at zero, x and w meet in float16
    loss   = mean(output)

With batches of one row the true gradient is that row, to the bit, and the scaled one overflows
where float16 says so: 4096 at a scale of 256 does, 0.5 does not.
"""

import keras
import numpy as np
from keras import ops

from gradlift import Cause
from gradlift.keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
LOSS_SEEN = BACKEND != "jax"  # in `fit`
HUGE, NAN = 4096.0, np.nan

OVERFLOW = Cause.OVERFLOW if LOSS_SEEN else Cause.UNKNOWN_NONFINITE
BAD_LOSS = Cause.LOSS_NONFINITE if LOSS_SEEN else Cause.UNKNOWN_NONFINITE

# The ways in which a backend runs `fit`.
WAYS = {
    "tensorflow": [
        {"jit_compile": False},
        {"jit_compile": True},
        {"run_eagerly": True},
        {"jit_compile": False, "steps_per_execution": 3},
    ],
    "jax": [{}, {"run_eagerly": True}, {"steps_per_execution": 3}],
    "torch": [{}],
}[BACKEND]
PLAIN = WAYS[0]


def output(y, predicted):
    return keras.ops.mean(predicted, axis=-1)


def line(optimizer, inputs=1, dtype="mixed_float16", **how):
    """The compiled model."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype, name="w")
    model = keras.Sequential([keras.Input((inputs,)), layer], name="line")
    model.compile(optimizer, **{"loss": output, **PLAIN, **how})
    return model


def lifted(inner=None, rule="dynamic:init_scale=2^8,growth_interval=4,max_scale=2^10", **settings):
    return LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), rule=rule, **settings)


def fit(model, *rows, **how):
    """One step a row, in this order."""
    x = np.array(rows, np.float32).reshape(len(rows), -1)
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0, **how}
    return model.fit(x, np.zeros((len(x), 1), np.float32), **settings)


def weights(model):
    return model.get_weights()[0].ravel().tolist()


def bits(variables):
    """Values to the bit, so that -0.0 and NaN count for what they are."""
    return [keras.ops.convert_to_numpy(v.value).tobytes() for v in variables]


SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW


def variable(*values):
    return keras.Variable(np.array(values, np.float32))


def named(name):
    return keras.Variable(np.zeros(1, np.float32), name=name)


def step(optimizer, variables, *true, loss=1.0):
    """One step by hand: true gradients, each times the scale."""
    optimizer.scale_loss(np.float32(loss))
    scale = ops.convert_to_tensor(optimizer.loss_scale)
    grads = [None if g is None else ops.convert_to_tensor(np.float32(g)) * scale for g in true]
    optimizer.apply(grads, variables)
    return optimizer.result


def tensor(*values, dtype=np.float32):
    return ops.convert_to_tensor(np.array(values, dtype))


def started(size=1, **settings):
    held = [keras.Variable(np.zeros(1, np.float32), name=f"v{i}") for i in range(size)]
    optimizer = LossScaleOptimizer(SGD(1.0), **(settings or {"initial_scale": 1024}))
    optimizer.build(held)
    return optimizer, held


def scaled(optimizer, *true):
    scale = optimizer.scale_loss(tensor(1.0)[0])
    return [tensor(g) * scale for g in true]

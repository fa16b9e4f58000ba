"""Keras on the backend of KERAS_BACKEND: a `.keras` file, weights, TensorFlow's checkpoint."""

import math

import keras
import numpy as np

from gradlift.keras import LossScaleOptimizer, ScaleLogger

from .lives import BAD

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    from .jax_cache import compile_once

    compile_once()


class Marker(keras.callbacks.Callback):
    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def on_train_batch_begin(self, batch, logs=None):
        self.mark("compiled step")

    def on_train_batch_end(self, batch, logs=None):
        self.mark("rest of fit")


def layer(size, seed, **how):
    start = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(size, kernel_initializer=start, name=f"layer{seed}", **how)


class File:
    """AdamW in `fit`, an epoch a step; the whole model in one file."""

    lag = 0

    def __init__(self, journal):
        rule = "dynamic:init_scale=2^10,growth_interval=3"
        x = keras.Input((8,))
        # Not Sequential, whose variables Keras calls by other names once it has loaded it. Seeds by
        # layer, since keras.utils.set_random_seed imports TensorFlow in every child.
        hidden = layer(32, 1, activation="tanh", dtype="mixed_float16")(x)
        self.model = keras.Model(x, layer(1, 2, dtype="float32")(hidden))
        optimizer = LossScaleOptimizer(keras.optimizers.AdamW(1e-2), rule=rule)
        self.model.compile(optimizer, loss="mse", jit_compile=False)
        optimizer.build(self.model.trainable_variables)
        self.logger = ScaleLogger(journal)

    def step(self, n, mark):
        x = np.random.default_rng(n).standard_normal((64, 8)).astype(np.float32)
        y = x[:, :1] * (1e9 if n == BAD[0] else math.nan if n == BAD[1] else 1.0)
        callbacks = [Marker(mark), self.logger]
        self.model.fit(x, y, batch_size=64, shuffle=False, verbose=0, callbacks=callbacks)

    def save(self, folder):
        self.model.save(folder / "model.keras")

    def load(self, folder):
        self.model = keras.models.load_model(folder / "model.keras")

    def state(self):
        held = [*self.model.variables, *self.model.optimizer.variables]
        return (keras.ops.convert_to_numpy(v.value) for v in held)


class Weights(File):
    """The weights of model and optimizer, into a model that is made anew."""

    def save(self, folder):
        self.model.save_weights(folder / "model.weights.h5")

    def load(self, folder):
        self.model.load_weights(folder / "model.weights.h5")


class Checkpoint(File):
    """TensorFlow's own: every variable by its place in the objects."""

    def save(self, folder):
        self.checkpoint().write(str(folder / "all"))

    def load(self, folder):
        self.checkpoint().read(str(folder / "all")).assert_consumed()

    def checkpoint(self):
        import tensorflow as tf

        return tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)


RUNS = {f"keras on {BACKEND}, .keras": File}
if BACKEND == "tensorflow":
    RUNS |= {f"keras on {BACKEND}, weights": Weights, f"keras on {BACKEND}, checkpoint": Checkpoint}

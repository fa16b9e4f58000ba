"""Keras 3 on TensorFlow, JAX and PyTorch: Keras' own LossScaleOptimizer, with rules, bounds,
causes and a record of every step.

>>> import keras, numpy as np
>>> from gradlift.keras import LossScaleOptimizer, ScaleLogger
>>> model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
>>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="dynamic:init_scale=2^8")
>>> model.compile(optimizer=optimizer, loss="mse")
>>> x = np.ones((8, 4), "float32")
>>> history = model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[ScaleLogger()])
>>> history.history["skipped"]
[0, 0]
>>> optimizer.result.stepped
True
"""

from .loss_scale_optimizer import LossScaleOptimizer
from .scale_logger import ScaleLogger

__all__ = ["LossScaleOptimizer", "ScaleLogger"]

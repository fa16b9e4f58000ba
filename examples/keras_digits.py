"""Handwritten digits with Keras: a small network trained in float16, and in float32 beside it.

    KERAS_BACKEND=jax python examples/keras_digits.py                # or tensorflow, or torch
    python examples/keras_digits.py --loss-weight 1e-8               # tiny gradients
    python examples/keras_digits.py --loss-weight 1e-8 --rule off    # and nothing to lift them

It takes half a minute. Held-out accuracy in %, float16 / float32, as measured (450 digits, so one
digit is 0.22); in the last two columns the loss is weighed down as above:

    backend            seed 0         seed 1         seed 2           1e-8      1e-8, off
    jax         98.00 / 98.44  98.67 / 98.67  98.00 / 98.00  98.00 / 98.00  63.78 / 98.00
    torch       98.22 / 98.44  98.00 / 98.00  98.67 / 98.67  98.22 / 98.22  70.67 / 98.22
    tensorflow  98.00 / 98.00  98.67 / 98.67  97.78 / 98.00  98.00 / 98.22  78.67 / 98.22

Lines that deal with float16 end in #.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

# Before Keras is imported: its backend, and what the libraries below it should know.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import keras
import numpy as np
from keras import layers, losses, optimizers
from sklearn.datasets import load_digits

from gradlift.keras import LossScaleOptimizer, ScaleLogger

BATCH, LR, MAX_NORM = 32, 2e-3, 1.0
EPS = 1e-15  # Adam's usual 1e-7 is larger than gradients may be
KEPT = 3 / 4  # to train on; the rest is held out


def load() -> tuple[np.ndarray, ...]:
    """Images and labels to train on, images and labels held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    train, held = np.split(order, [int(len(order) * KEPT)])
    return images[train], labels[train], images[held], labels[held]


def network() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, dtype="float32"),  # so the loss is computed in float32
        ]
    )


def train(
    policy: str, epochs: int, seed: int, rule: str, loss_weight: float, journal: Path
) -> tuple[float, keras.optimizers.Optimizer]:
    """Trains under a dtype policy; returns held-out accuracy and the optimizer."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    images, labels, held_images, held_labels = load()
    model = network()
    schedule = optimizers.schedules.CosineDecay(LR, epochs * -(-len(labels) // BATCH))
    optimizer = optimizers.AdamW(schedule, epsilon=EPS, global_clipnorm=MAX_NORM)
    callbacks = []
    if policy == "mixed_float16":
        optimizer = LossScaleOptimizer(optimizer, rule=rule)  #
        callbacks = [ScaleLogger(journal)]  #
    model.compile(
        optimizer,
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        loss_weights=loss_weight,
        metrics=["accuracy"],
    )
    print(f"\n{policy} on {keras.backend.backend()}")
    model.fit(images, labels, BATCH, epochs, verbose=2, callbacks=callbacks)
    return model.evaluate(held_images, held_labels, verbose=0)[1], optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network in float16 and float32.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", default="auto", help="how the scale moves")
    parser.add_argument("--loss-weight", type=float, default=1.0, help="makes gradients as small")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parser.add_argument(
        "--journal", type=Path, default=Path(f"gradlift-runs/keras-digits-{stamp}.jsonl")
    )
    options = vars(parser.parse_args())
    half, optimizer = train("mixed_float16", **options)
    single, _ = train("float32", **options)
    print(f"\nheld-out accuracy: float16 {half:.2%}, float32 {single:.2%}")
    record = optimizer.record
    print(f"scale 2^{math.log2(record.state.scale):g}, {record.skipped} steps skipped")
    print(f"the journal: gradlift report {options['journal']}")

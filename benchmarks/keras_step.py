"""What a LossScaleOptimizer adds to the optimizer's step in Keras: gradlift's beside Keras' own.

    python benchmarks/keras_step.py                 all three backends, each in its own process
    python benchmarks/keras_step.py --backend jax

One process a backend; contenders take turns, medians, ratios. The step is the optimizer's alone
(gradients are given): compiled with donated buffers on JAX, a `tf.function` on TensorFlow, eager on
PyTorch, as `fit` runs it. A 6.3M-parameter MLP, AdamW.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

WIDTH, DEPTH = 1024, 6


def contenders(rule):
    import keras

    from gradlift.keras import LossScaleOptimizer

    def inner():
        return keras.optimizers.AdamW(1e-4)

    return {
        "AdamW": inner(),
        "Keras": keras.optimizers.LossScaleOptimizer(inner()),
        "gradlift": LossScaleOptimizer(inner()),
        f"gradlift, {rule}": LossScaleOptimizer(inner(), rule=rule),
    }


def stepper(optimizer, backend, shapes):
    """A function that takes one step and waits for it."""
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    variables = [keras.Variable(rng.standard_normal(s).astype("float32")) for s in shapes]
    optimizer.build(variables)
    if hasattr(optimizer, "rule"):
        optimizer.scale_loss(np.float32(1))
    scaled = [keras.ops.convert_to_tensor(rng.standard_normal(s).astype("float32")) for s in shapes]
    if backend == "jax":
        import jax

        apply = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
        state = [v.value for v in optimizer.variables], [v.value for v in variables]

        def step():
            nonlocal state
            weights, held = apply(state[0], scaled, state[1])
            jax.block_until_ready((weights, held))
            state = held, weights

    elif backend == "tensorflow":
        import tensorflow as tf

        apply = tf.function(lambda: optimizer.apply(scaled, variables))

        def step():
            apply()
            variables[-1].numpy()

    else:
        import torch

        @torch.no_grad()
        def step():
            optimizer.apply(scaled, variables)

    return step


def measure(backend, rounds, rule):
    shapes = [s for _ in range(DEPTH) for s in ((WIDTH, WIDTH), (WIDTH,))]
    steps = {n: stepper(o, backend, shapes) for n, o in contenders(rule).items()}
    times = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) * 1e3 for name, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=["tensorflow", "jax", "torch"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rule", default="auto:cautious")
    options = parser.parse_args()
    if options.backend is None:
        for backend in ("tensorflow", "jax", "torch"):
            again = [sys.executable, __file__, "--backend", backend]
            again += ["--rounds", str(options.rounds), "--rule", options.rule]
            subprocess.run(again, check=True)
        return
    os.environ["KERAS_BACKEND"] = options.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    found = measure(options.backend, options.rounds, options.rule)
    bare, own = found["AdamW"], found["Keras"] - found["AdamW"]
    print(
        f"\n{options.backend}: {'optimizer':24} {'ms':>7} {'x AdamW':>8} {'overhead / Keras':>17}"
    )
    for name, ms in found.items():
        share = (ms - bare) / own
        print(f"{'':{len(options.backend)}}  {name:24} {ms:7.2f} {ms / bare:8.2f} {share:17.2f}")


if __name__ == "__main__":
    main()

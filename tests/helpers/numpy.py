"""What the tests of gradlift.numpy share."""

import numpy as np

import gradlift.numpy as gl


def sgd(weights, grads):
    for name, g in grads.items():
        if g is not None:
            weights[name] -= g


def batch(peak):
    def compute(scale):
        with np.errstate(over="ignore"):
            return 1.0, {"w": np.float16([peak * scale])}

    return compute


def train(journal=None, steps=60):
    rng = np.random.default_rng(0)
    scaler = gl.Scaler("auto", journal=journal)
    weights = {"w": np.zeros(8, np.float32), "b": np.zeros(1, np.float32)}
    for _ in range(steps):
        g = rng.standard_normal(9).astype(np.float32) * 2.0 ** rng.normal(0, 4)
        with np.errstate(over="ignore"):
            scaled = np.float16(g * scaler.get_scale())
        scaler.scale(float(abs(g).sum()))
        scaler.step(weights, {"w": scaled[:8], "b": scaled[8:]}, sgd, max_norm=1.0)
    return weights, scaler

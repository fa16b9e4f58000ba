"""The NumPy adapter's driver. Other adapters exchange saved states with it."""

import numpy as np

import gradlift.numpy as gl
from gradlift import Journal


class NumpyDriver:
    adapter = framework = "numpy"
    CANNOT = {
        "lr": "the update is your own function",
        "half_loss": "the backward pass is your own: nothing casts the scale to float16",
    }

    def __init__(self, rule, journal=None, **limits):
        self.journal = Journal(journal) if journal else None
        self.scaler = gl.Scaler(rule, journal=self.journal, **limits)
        self.params = {"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}

    def step(self, loss, grads):
        return self.window([(loss, grads)])

    def window(self, batches):
        total = {}
        for loss, grads in batches:
            self.scaler.scale(loss)
            for name, g in self.scaled(grads, self.scaler.get_scale()).items():
                total[name] = total.get(name, 0) + g
        self.scaler.step(self.params, total, self.sgd)
        return self.outcome()

    def train(self, batches, retries):
        for loss, grads in batches:
            compute = lambda scale, loss=loss, grads=grads: (loss, self.scaled(grads, scale))
            self.scaler.train_step(compute, self.params, self.sgd, retries=retries)
        return self.outcome()

    def scaled(self, grads, scale):
        """float16(gradient * scale), as a backward pass in float16 would leave it."""
        with np.errstate(over="ignore", invalid="ignore"):
            return {n: np.float16(g * np.float32(scale)).astype("f4") for n, g in grads.items()}

    def sgd(self, params, grads):
        for name, g in grads.items():
            params[name] -= g

    def outcome(self):
        return self.result.stepped, self.result.cause, self.scaler.get_scale(), self.params

    @property
    def result(self):
        return self.scaler.result

    @property
    def skipped_steps(self):
        return self.scaler.skipped_steps

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, data):
        self.scaler.load_state_dict(data)

    def close(self):
        if self.journal is not None:
            self.journal.close()

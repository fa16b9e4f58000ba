"""NumPy: weights in an .npz, the scaler's state beside them as JSON."""

import json
import math

import numpy as np

import gradlift.numpy as gl

from .lives import BAD


class Plain:
    """A straight line with momentum, its gradients in float16."""

    lag = 0

    def __init__(self, journal):
        self.weights = {"w": np.zeros(32, np.float32), "b": np.zeros(1, np.float32)}
        self.momentum = {name: np.zeros_like(w) for name, w in self.weights.items()}
        rule = "dynamic:init_scale=2^10,growth_interval=3"
        self.scaler = gl.Scaler(rule, journal=journal)

    def step(self, n, mark):
        mark("gradients")
        rng = np.random.default_rng(n)
        x = rng.standard_normal((64, 32)).astype(np.float32)
        off = x @ self.weights["w"] + self.weights["b"] - np.sin(x.sum(1))
        loss = float(np.mean(off**2)) * (math.nan if n == BAD[1] else 1.0)
        times = np.float32(self.scaler.scale(loss) / loss) * (1e30 if n == BAD[0] else 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            slope = off * times / 32
            grads = {"w": np.float16(slope @ x), "b": np.float16([slope.sum()])}
        mark("scaler.step")
        self.scaler.step(self.weights, grads, self.update, max_norm=1.0)

    def update(self, weights, grads):
        for name, g in grads.items():
            self.momentum[name] = np.float32(0.9) * self.momentum[name] + g
            weights[name] -= np.float32(0.05) * self.momentum[name]

    def save(self, folder):
        moments = {f"momentum.{name}": m for name, m in self.momentum.items()}
        np.savez(folder / "all.npz", **self.weights, **moments)
        (folder / "scaler.json").write_text(json.dumps(self.scaler.state_dict()))

    def load(self, folder):
        with np.load(folder / "all.npz") as held:
            for name in self.weights:
                self.weights[name] = held[name]
                self.momentum[name] = held[f"momentum.{name}"]
        self.scaler.load_state_dict(json.loads((folder / "scaler.json").read_text()))

    def state(self):
        yield from self.weights.values()
        yield from self.momentum.values()
        yield json.dumps(self.scaler.state_dict(), sort_keys=True)


RUNS = {"numpy": Plain}

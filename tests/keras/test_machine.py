"""Keras: everything a user may do, in any order, beside the reference; as each backend runs it."""

import keras
import numpy as np
import pytest
from keras import ops
from machines.machine import BACKOFF, LIMITS, Whole, any_order, machine_for
from test_conformance import Function, Stateful, Stateless

BACKEND = keras.backend.backend()


class Acting(Whole):
    CAN = {"save"}
    RULES, LIMITS, WINDOWS, mixes = [*BACKOFF, "auto"], LIMITS, (1, 2, 3), True
    sums, averages, half_weights = np.float32, False, False

    def weights(self):
        return {n: ops.convert_to_numpy(p.value) for n, p in self.params.items()}

    def get_scale(self):
        return self.optimizer.get_scale()

    def everything(self):
        held = [*self.params.values(), *self.optimizer.inner_optimizer.variables]
        return [ops.convert_to_numpy(v.value).tobytes() for v in held]

    def save(self):
        """What a model's file has of its optimizer and its weights."""
        store = {}
        self.optimizer.save_own_variables(store)
        held = {
            n: np.array(v if n == "rule" else ops.convert_to_numpy(v)) for n, v in store.items()
        }
        return held, {n: w.copy() for n, w in self.weights().items()}

    def load(self, saved):
        store, weights = saved
        self.optimizer.load_own_variables(store)
        for n, w in weights.items():
            self.params[n].assign(w)
        self.zero_grad()

    def kill(self):
        self.close()


class Apply(Acting, Stateful):
    """`apply`, called from Python."""


class Graph(Acting, Function):
    """A `tf.function`."""

    RULES, WINDOWS, mixes = BACKOFF[:2], (1, 2), False


class Jitted(Acting, Stateless):
    """What `fit` does on JAX."""

    RULES, WINDOWS, mixes = BACKOFF[:2], (1, 2), False


DRIVERS = {"tensorflow": [Apply, Graph], "jax": [Apply, Jitted], "torch": [Apply]}
MACHINES = [machine_for(Driver) for Driver in DRIVERS[BACKEND]]
EXAMPLES = {"Apply": 15, "Graph": 3, "Jitted": 3}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_any_order(machine):
    any_order(machine, EXAMPLES[machine.Driver.__name__])

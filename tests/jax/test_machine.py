"""JAX: everything a user may do, in any order, beside the reference; explicit and wrapped.

Programs are compiled once for each rule and each shape of a window, so there are few of both.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines.machine import LIMITS, Whole, any_order, machine_for
from test_conformance import SGD, Eager, Explicit, Wrapped

import gradlift.jax as gl


@functools.cache
def compiled(function, names):
    """One program for all runs."""
    return jax.jit(function, static_argnames=names)


class Acting(Whole):
    CAN = {"retry", "save"}
    RULES = ["backoff:init_scale=16,growth_interval=2,min_scale=4,max_scale=2^16", "auto:sharp"]
    LIMITS, WINDOWS, RETRIES, mixes = LIMITS, (1, 2), (0, 2), False
    sums, averages, half_weights = np.float32, True, False

    def window(self, batches):
        if len(batches) > 1:
            super().window(batches)
        else:
            ((loss, grads),) = batches
            self.stepped(jnp.float32(loss), grads)

    def train_step(self, loss, grads, retries):
        self.stepped(jnp.float32(loss), grads, retries=retries)

    def weights(self):
        return {n: np.asarray(w) for n, w in self.params.items()}

    def get_scale(self):
        return self.scaler.get_scale()

    def everything(self):
        """Weights and the optimizer's state."""
        held = self.params, getattr(self.state, "inner", self.state)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(held)]

    def save(self):
        return json.dumps([self.state_dict(), {n: w.tolist() for n, w in self.weights().items()}])

    def load(self, saved):
        state, params = json.loads(saved)
        self.load_state_dict(state)
        self.params = {n: jnp.asarray(w, jnp.float32) for n, w in params.items()}
        self.zero_grad()

    def load_state_dict(self, data):
        self.scaler = self.scaler.load_state_dict(data)
        self.steps = int(self.scaler.steps)
        if hasattr(self.state, "scaler"):
            self.state = self.state._replace(scaler=self.scaler)

    def kill(self):
        self.close()


class Jitted(Acting, Explicit):
    @staticmethod
    def jit(f, static_argnames):
        return compiled(f, static_argnames)


class Unjitted(Acting, Eager):
    pass


@functools.cache
def wrapped(rule):
    tx = gl.wrap(SGD, rule)
    return tx, jax.jit(functools.partial(Wrapped.update, tx))


class Wrap(Acting, Wrapped):
    CAN = {"save"}
    averages = False

    def __init__(self, rule, journal=None, **limits):
        Explicit.__init__(self, rule, journal, **limits)
        self.tx, self.compiled = wrapped(rule)
        self.state = self.tx.init(self.params)


MACHINES = [machine_for(Driver) for Driver in (Jitted, Unjitted, Wrap)]
EXAMPLES = {"Jitted": 20, "Unjitted": 5, "Wrap": 20}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_any_order(machine):
    any_order(machine, EXAMPLES[machine.Driver.__name__])

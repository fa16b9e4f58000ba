"""Both routes against the suite that every adapter passes, eager and jitted.

Not known in JAX: how many steps were skipped (no object lives through the run to count them), and
the events of retries, which happen inside the graph. `amax` is taken where the rule needs it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance.suite import *  # noqa: F403

import gradlift.jax as gl
from gradlift import Cause, Journal, Verdict
from gradlift.core import Limits, result_of


@jax.custom_vjp
def given(params, loss, grads):
    """A loss and its gradients as given, with a backward pass in float16."""
    return loss


def forward(params, loss, grads):
    return loss, grads


def backward(grads, upstream):
    halves = {n: (g * upstream).astype(jnp.float16).astype(jnp.float32) for n, g in grads.items()}
    return halves, None, None


given.defvjp(forward, backward)
SGD = optax.sgd(1.0)


class Explicit:
    """Route A."""

    jit = staticmethod(jax.jit)
    counts_skips = False

    def __init__(self, rule, journal=None, **limits):
        self.scaler, self.limits = gl.Scaler(rule), Limits(**limits)
        self.journal = None if journal is None else Journal(journal)
        self.params = {"a": jnp.ones(4), "b": jnp.ones(2)}
        self.state, self.steps, self.result = SGD.init(self.params), 0, None
        self.compiled = self.jit(self.one)

    @staticmethod
    def one(scaler, state, params, loss, grads):
        if not grads:  # nothing depends on the parameters
            _, found, scaler, result = gl.value_and_grad(lambda nothing: loss)(scaler, {})
            return scaler, state, params, result
        _, found, scaler, result = gl.value_and_grad(given)(scaler, params, loss, grads)
        params, state = gl.apply(SGD, found, state, params, result)
        return scaler, state, params, result

    def step(self, loss, grads):
        grads = {n: jnp.asarray(g) for n, g in grads.items()}
        after = self.compiled(self.scaler, self.state, self.params, jnp.float32(loss), grads)
        self.scaler, self.state, self.params, result = after
        step, self.steps = self.steps, self.steps + 1
        self.result = result_of(result.read(step), Verdict.HALT)  # unless log() returns
        self.result = gl.log(self.journal, result, step, limits=self.limits)
        params = {n: np.asarray(p) for n, p in self.params.items()}
        scale = float(self.scaler.state.scale)
        return bool(result.stepped), Cause(int(result.cause)), scale, params

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, data):
        self.scaler = self.scaler.load_state_dict(data)

    def close(self):
        if self.journal is not None:
            self.journal.close()


class Eager(Explicit):
    jit = staticmethod(lambda f: f)


class Wrapped(Explicit):
    """Route B."""

    def __init__(self, rule, journal=None, **limits):
        super().__init__(rule, journal, **limits)
        self.tx = gl.wrap(SGD, rule)
        self.state = self.tx.init(self.params)
        self.compiled = self.jit(functools.partial(self.update, self.tx))

    @staticmethod
    def update(tx, scaler, state, params, loss, grads):
        if not grads:
            _, after = tx.update({}, tx.init({})._replace(scaler=state.scaler), {}, value=loss)
            return after.scaler, state._replace(scaler=after.scaler), params, after.result
        scaled = jax.grad(lambda p: gl.scale_loss(given(p, loss, grads), state))(params)
        updates, state = tx.update(scaled, state, params, value=loss)
        return state.scaler, state, optax.apply_updates(params, updates), state.result

    def load_state_dict(self, data):
        super().load_state_dict(data)
        self.state = self.state._replace(scaler=self.scaler)


@pytest.fixture(params=[Explicit, Eager, Wrapped], ids=lambda d: d.__name__)
def Driver(request):
    return request.param

"""Both routes against the suite that every adapter passes, eager and jitted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance.suite import *  # noqa: F403

import gradlift.jax as gl
from gradlift import Cause
from gradlift.verdict import Limits


@jax.custom_vjp
def given(params, loss, grads):
    """A loss and its gradients as told, with a backward pass in float16."""
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

    def __init__(self, rule, **limits):
        self.scaler, self.limits = gl.Scaler(rule), Limits(**limits)
        self.params = {"a": jnp.ones(4), "b": jnp.ones(2)}
        self.state, self.steps = SGD.init(self.params), 0
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
        told = self.compiled(self.scaler, self.state, self.params, jnp.float32(loss), grads)
        self.scaler, self.state, self.params, result = told
        gl.enforce(self.scaler, result, self.limits, self.steps)
        self.steps += 1
        params = {n: np.asarray(p) for n, p in self.params.items()}
        scale = float(self.scaler.state.scale)
        return bool(result.stepped), Cause(int(result.cause)), scale, params


class Eager(Explicit):
    jit = staticmethod(lambda f: f)


class Wrapped(Explicit):
    """Route B."""

    def __init__(self, rule, **limits):
        super().__init__(rule, **limits)
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


@pytest.fixture(params=[Explicit, Eager, Wrapped], ids=lambda d: d.__name__)
def Driver(request):
    return request.param

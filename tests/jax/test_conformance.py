"""Both routes against the suites that every adapter passes: eager, jitted and in a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance.records import *  # noqa: F403
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
    """Route A, jitted."""

    adapter, framework = "jax", "jax"
    CANNOT = {
        "amax": "it is one more reduction in the compiled step",
        "retry events": "retries happen inside the graph",
    }
    jit = staticmethod(jax.jit)

    def __init__(self, rule, journal=None, **limits):
        self.rule, self.limits = rule, Limits(**limits)
        self.scaler = gl.Scaler(rule)
        self.journal = None if journal is None else Journal(journal)
        self.params = {"a": jnp.ones(4), "b": jnp.ones(2)}
        self.state, self.steps, self.result = SGD.init(self.params), 0, None
        self.compiled = self.jit(self.one, static_argnames=("retries", "accumulate"))

    @staticmethod
    def one(scaler, state, params, loss, grads, **how):
        if not grads:  # nothing depends on the parameters
            _, found, scaler, result = gl.value_and_grad(lambda nothing: loss)(scaler, {})
            return scaler, state, params, result
        _, found, scaler, result = gl.value_and_grad(given, **how)(scaler, params, loss, grads)
        params, state = gl.apply(SGD, found, state, params, result)
        return scaler, state, params, result

    def step(self, loss, grads):
        return self.stepped(jnp.float32(loss), grads)

    def half(self, loss, grads):
        return self.stepped(jnp.float16(loss), grads)

    def window(self, batches):
        """Micro-batches are averaged, so that each is given its share of a sum."""
        n = len(batches)
        losses = jnp.float32([n * loss for loss, _ in batches])
        grads = {k: n * np.stack([g[k] for _, g in batches]) for k in "ab"}
        return self.stepped(losses, grads, accumulate=True)

    def train(self, batches, retries):
        if not self.steps:
            self.scaler = gl.Scaler(self.rule, retries=True)
        ((loss, grads),) = batches
        return self.stepped(jnp.float32(loss), grads, retries=retries)

    def stepped(self, loss, grads, **how):
        grads = {n: jnp.asarray(g) for n, g in grads.items()}
        after = self.compiled(self.scaler, self.state, self.params, loss, grads, **how)
        self.scaler, self.state, self.params, result = after
        step, self.steps = self.steps, self.steps + 1
        self.result = result_of(result.read(step), Verdict.HALT)  # unless log() returns
        self.result = gl.log(self.journal, result, step, lr=1.0, limits=self.limits)
        params = {n: np.asarray(p) for n, p in self.params.items()}
        return bool(result.stepped), Cause(int(result.cause)), self.scaler.get_scale(), params

    @property
    def skipped_steps(self):
        return int(self.scaler.skipped_steps)

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, data):
        """The rule is part of the program, so that who resumes says whether batches are retried."""
        sharp = data["gradlift"]["sharp"]
        self.scaler = gl.Scaler(self.rule, retries=sharp).load_state_dict(data)
        self.steps = int(self.scaler.steps)

    def close(self):
        if self.journal is not None:
            self.journal.close()


class Eager(Explicit):
    jit = staticmethod(lambda f, **how: f)


class Scanned(Explicit):
    """Route A, each step a `lax.scan`."""

    @staticmethod
    def jit(f, **how):
        def scanned(scaler, state, params, loss, grads, **how):
            def body(carry, batch):
                *carry, result = f(*carry, *batch, **how)
                return tuple(carry), result

            batch = jax.tree.map(lambda x: jnp.asarray(x)[None], (loss, grads))
            carry, results = jax.lax.scan(body, (scaler, state, params), batch)
            return *carry, jax.tree.map(lambda x: x[0], results)

        return jax.jit(scanned, **how)


class Wrapped(Explicit):
    """Route B, jitted."""

    adapter = "jax, wrap"
    CANNOT = {
        "amax": Explicit.CANNOT["amax"],
        "retries": "the optimizer sees gradients, not the batch",
        "half_loss": "scaled refuses a float16 loss if the scale may pass 2^15",
    }
    half = train = None

    def __init__(self, rule, journal=None, **limits):
        super().__init__(rule, journal, **limits)
        self.tx = gl.wrap(SGD, rule)
        self.state = self.tx.init(self.params)
        self.compiled = self.jit(functools.partial(self.update, self.tx))

    def window(self, batches):
        losses = jnp.float32([loss for loss, _ in batches])
        return self.stepped(losses, {k: np.stack([g[k] for _, g in batches]) for k in "ab"})

    @staticmethod
    def update(tx, scaler, state, params, losses, grads):
        if not grads:
            _, after = tx.update({}, tx.init({})._replace(scaler=state.scaler), {}, value=losses)
            return after.scaler, state._replace(scaler=after.scaler), params, after.result

        backward = jax.grad(gl.scaled(given, state))
        if losses.ndim:
            parts = [jax.tree.map(lambda x, i=i: x[i], grads) for i in range(len(losses))]
            each = [backward(params, loss, g) for loss, g in zip(losses, parts)]
            total = jax.tree.map(lambda *g: sum(g), *each)
        else:
            total = backward(params, losses, grads)
        updates, state = tx.update(total, state, params, value=losses)
        return state.scaler, state, optax.apply_updates(params, updates), state.result

    def load_state_dict(self, data):
        self.scaler = self.scaler.load_state_dict(data)
        self.state = self.state._replace(scaler=self.scaler)
        self.steps = int(self.scaler.steps)


@pytest.fixture(params=[Explicit, Eager, Scanned, Wrapped], ids=lambda d: d.__name__)
def Driver(request):
    return request.param

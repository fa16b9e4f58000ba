"""Model libraries: plain dicts, equinox, flax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.jax import ADAMW, bits

import gradlift.jax as gl
from gradlift import Cause

INPUTS = jax.random.normal(jax.random.key(0), (32, 4))

Y = INPUTS[:, :1] * 2 - INPUTS[:, 1:2]

BAD_LOSS, HUGE = jnp.nan, 1e30


def train(step, carry):
    """It learns in thirty good steps; an overflow and a non-finite loss change nothing."""
    losses = []
    for _ in range(30):
        *carry, loss, result = step(*carry, 1.0)
        losses.append(float(loss))
        assert bool(result.stepped)
    assert losses[-1] < losses[0] / 2
    before = bits(carry[:-1])
    for times, cause in ((HUGE, Cause.OVERFLOW), (BAD_LOSS, Cause.LOSS_NONFINITE)):
        *carry, loss, result = step(*carry, times)
        assert Cause(int(result.cause)) is cause
        assert bits(carry[:-1]) == before


def squared(out, times):
    return jnp.square(out.astype(jnp.float32) - Y).mean() * times


def test_plain_dicts():
    keys = jax.random.split(jax.random.key(1))
    params = {
        "in": {"w": jax.random.normal(keys[0], (4, 16)) / 2, "b": jnp.zeros(16)},
        "out": {"w": jax.random.normal(keys[1], (16, 1)) / 4},
    }
    policy = gl.Policy("params=float32,compute=float16,output=float32")

    def loss_fn(params, x, times):
        p, x = policy.cast_to_compute((params, x))
        out = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]["w"]
        return squared(policy.cast_to_output(out), times)

    @jax.jit
    def step(params, state, scaler, times):
        run = gl.value_and_grad(loss_fn, retries=3)
        loss, grads, scaler, result = run(scaler, params, INPUTS, times)
        params, state = gl.apply(ADAMW, grads, state, params, result, max_norm=1.0)
        return params, state, scaler, loss, result

    train(step, (params, ADAMW.init(params), gl.Scaler("auto", retries=True)))


def test_equinox():
    """None where a leaf is no array, as `partition` leaves it."""
    model = eqx.nn.MLP(4, 1, 16, 1, activation=jnp.tanh, key=jax.random.key(2))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert any(x is None for x in jax.tree.leaves(params, is_leaf=lambda x: x is None))

    def loss_fn(params, x, times):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        return squared(jax.vmap(eqx.combine(half, static))(x.astype(jnp.float16)), times)

    @jax.jit
    def step(params, state, scaler, times):
        loss, grads, scaler, result = gl.value_and_grad(loss_fn, retries=3)(
            scaler, params, INPUTS, times
        )
        params, state = gl.apply(ADAMW, grads, state, params, result)
        return params, state, scaler, loss, result

    train(step, (params, ADAMW.init(params), gl.Scaler("auto", retries=True)))
    _, grads, _, _ = gl.value_and_grad(loss_fn)(gl.Scaler("static:8"), params, INPUTS, BAD_LOSS)
    assert all(name.startswith("layers.") for name in gl.culprits(grads))
    assert len(gl.culprits(grads)) == 4


def test_equinox_modules_with_filtered_jit():
    model = eqx.nn.Linear(4, 1, key=jax.random.key(2))
    tx = gl.wrap(ADAMW, "dynamic:init_scale=16")

    @eqx.filter_jit
    def step(model, state, times):
        def loss_fn(model):
            return squared(jax.vmap(model)(INPUTS).astype(jnp.float16), times)

        loss, grads = eqx.filter_value_and_grad(gl.scaled(loss_fn, state))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array), value=loss)
        return eqx.apply_updates(model, updates), state, loss

    state = tx.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(20):
        model, state, loss = step(model, state, 1.0)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    before = bits(eqx.filter(model, eqx.is_array))
    model, state, _ = step(model, state, HUGE)
    assert bits(eqx.filter(model, eqx.is_array)) == before
    assert float(state.scaler.state.scale) == 8.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 16, dtype=jnp.float16, rngs=rngs)
        self.outer = nnx.Linear(16, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


def test_flax_nnx():
    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss_fn(params, x, times):
        return squared(nnx.merge(graph, params)(x), times)

    @jax.jit
    def step(params, state, scaler, times):
        loss, grads, scaler, result = gl.value_and_grad(loss_fn, retries=3)(
            scaler, params, INPUTS, times
        )
        params, state = gl.apply(ADAMW, grads, state, params, result)
        return params, state, scaler, loss, result

    train(step, (params, ADAMW.init(params), gl.Scaler("auto", retries=True)))


def test_flax_nnx_optimizer_carries_the_scaler():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, gl.wrap(ADAMW, "auto", max_norm=1.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss_fn = gl.scaled(lambda model: squared(model(INPUTS), 1.0), optimizer.opt_state)
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads, value=loss)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


class Counting(nnx.Module):
    """A float32 net that changes itself in the forward pass."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, use_bias=False, rngs=rngs)  # of which norm is blind
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


def nnx_plain(model, optimizer, scaler, times):
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(INPUTS)).sum() * times)(model)
    optimizer.update(model, grads)
    return scaler, loss


def nnx_update(model, optimizer, grads):
    optimizer.update(model, grads)


def nnx_explicit(model, optimizer, scaler, times):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.square(model(INPUTS)).sum() * times, nnx.split(model, nnx.Param, ...)[2]

    (loss, rest), grads, scaler, result = gl.value_and_grad(loss_fn, has_aux=True)(scaler, params)
    nnx.update(model, rest)
    nnx.cond(result.stepped, nnx_update, lambda *_: None, model, optimizer, grads)
    return scaler, loss


def nnx_wrapped(model, optimizer, scaler, times):
    loss_fn = gl.scaled(lambda m: jnp.square(m(INPUTS)).sum() * times, optimizer.opt_state)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads, value=loss)
    return scaler, loss


@pytest.mark.parametrize("how", [nnx_explicit, nnx_wrapped])
def test_an_nnx_step_is_the_plain_one_and_a_skip_changes_nothing(how):
    made = []
    for step, tx in ((nnx_plain, ADAMW), (how, gl.wrap(ADAMW, "static:2^10"))):
        model = Counting(nnx.Rngs(0))
        tx = ADAMW if step is nnx_explicit else tx
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        run, scaler = nnx.jit(step), gl.Scaler("static:2^10")
        for _ in range(5):
            scaler, _ = run(model, optimizer, scaler, 1.0)
        made.append((model, optimizer, run, scaler))
    (plain, *_), (model, optimizer, run, scaler) = made
    for kind in (nnx.Param, nnx.BatchStat):
        found, wanted = (jax.tree.leaves(nnx.state(m, kind)) for m in (model, plain))
        assert len(found) > 1
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)  # XLA fuses them differently
    before = bits(nnx.state(model, nnx.Param)), int(optimizer.step[...])
    after_skip, _ = run(model, optimizer, scaler, jnp.inf)
    assert bits(nnx.state(model, nnx.Param)) == before[0]
    if how is nnx_explicit:
        assert int(optimizer.step[...]) == before[1]
        assert int(after_skip.skipped_steps) == 1
    else:
        assert int(optimizer.opt_state.scaler.skipped_steps[...]) == 1

"""The scale on its way: into the loss, out of the gradients, and where it goes next."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jax import OPT, X, bits, start

import gradlift.jax as gl
from gradlift.errors import MisuseError


def test_a_clean_step_is_the_plain_optimizers():
    """A power of two comes and goes without a trace; so does the selection."""
    params, state, scaler = start("static:2^10")

    def loss(params, x):
        return jnp.square(x @ params["w"] + params["b"]).mean()

    @jax.jit
    def plain(params, state):
        grads = jax.grad(loss)(params, X)
        updates, state = OPT.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def lifted(params, state, scaler):
        _, grads, scaler, result = gl.value_and_grad(loss)(scaler, params, X)
        return gl.apply(OPT, grads, state, params, result), grads

    wanted, (got, grads) = plain(params, state), lifted(params, state, scaler)
    assert bits(grads) == bits(jax.jit(jax.grad(loss))(params, X))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)  # XLA may contract multiply-adds elsewhere


def test_off_touches_nothing():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    bad = jnp.array([1.0, jnp.nan], jnp.bfloat16)
    _, grads, _scaler, result = gl.value_and_grad(lambda p: (p["w"] * bad).sum())(
        gl.Scaler("off"), params
    )
    assert grads["w"].dtype == jnp.bfloat16  # nothing is cast
    assert bool(result.stepped)
    assert math.isnan(float(result.grad_norm))
    text = str(jax.make_jaxpr(gl.value_and_grad(lambda p: p.sum()))(gl.Scaler("off"), jnp.ones(2)))
    assert "is_finite" not in text
    tx = gl.wrap(optax.sgd(1.0), "off")
    updates, state = tx.update({"w": bad}, tx.init(params), params)
    assert float(updates["w"][0]) == -1
    assert bool(jnp.isnan(updates["w"][1]))
    assert bool(state.result.stepped)


# Types
def test_a_float16_loss_carries_two_to_the_15_at_most():
    def loss(w):
        return (w.astype(jnp.float16) * jnp.float16(2**-4)).sum()

    _, grads, scaler, result = jax.jit(gl.value_and_grad(loss))(gl.Scaler("dynamic"), jnp.ones(2))
    assert grads.tolist() == [2**-4, 2**-4]
    assert float(result.scale) == 2.0**15 == float(scaler.state.scale)
    with pytest.raises(MisuseError, match="compute the loss in float32"):
        gl.value_and_grad(loss)(gl.Scaler("static:2^16"), jnp.ones(2))
    tx = gl.wrap(OPT, "dynamic")
    with pytest.raises(MisuseError, match="max_scale=2\\^15"):
        jax.grad(gl.scaled(loss, tx.init(jnp.ones(2))))(jnp.ones(2))
    fits = gl.wrap(OPT, "dynamic:init_scale=2^15,max_scale=2^15").init(jnp.ones(2))
    assert jax.grad(gl.scaled(loss, fits))(jnp.ones(2)).tolist() == [2**-4, 2**-4]


def test_a_float16_loss_tells_the_scale_that_comes_next():
    scaler = gl.Scaler("dynamic:growth_interval=1")
    loss_fn = lambda p: (p.astype(jnp.float16) * jnp.float16(0.01)).sum()
    for _ in range(3):
        *_, scaler, result = gl.value_and_grad(loss_fn)(scaler, jnp.ones(2))
        assert float(result.scale) == float(result.next_scale) == float(scaler.state.scale) == 2**15


def test_gradients_of_16_bit_parameters_are_unscaled_in_float32():
    """What float16 holds only scaled is there without the scale."""
    _, grads, _, result = gl.value_and_grad(lambda w: w.astype(jnp.float32).sum() * 2.0**-30)(
        gl.Scaler("static:2^24"), jnp.ones(2, jnp.float16)
    )
    assert grads.dtype == jnp.float32
    assert grads.tolist() == [2.0**-30] * 2
    assert float(result.grad_norm) == pytest.approx(2.0**-29.5, rel=1e-6, abs=0)

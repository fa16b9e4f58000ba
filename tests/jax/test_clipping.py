"""Clipping measures true gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jax import X, half_loss, result_of, start, step

import gradlift.jax as gl
from gradlift.core import clip_coefficient
from gradlift.errors import SettingsError


def test_clipping_takes_the_true_norm():
    params, _, scaler = start("static:2^10")
    sgd = optax.sgd(1.0)
    one = jax.jit(functools.partial(step, optimizer=sgd, clip=0.25))
    after, _, _, result = one(params, sgd.init(params), scaler, X)
    grads = jax.grad(half_loss)(params, X)
    assert float(result.grad_norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-3)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, after, params))
    assert float(moved) == pytest.approx(0.25, rel=1e-4)


def test_clipping_measures_what_it_is_given():
    """Gradients changed by the user, a part of them, or those of `Off`: the norm is taken anew."""
    params, sgd = {"a": jnp.ones(4), "b": jnp.ones(9)}, optax.sgd(1.0)

    def moved(scaler, change):
        _, grads, _, result = gl.value_and_grad(lambda p: p["a"].sum() + p["b"].sum())(
            gl.Scaler(scaler), params
        )
        some, grads = change(params, grads)
        after, _ = gl.apply(sgd, grads, sgd.init(some), some, result, max_norm=1.0)
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, after, some)))

    for scaler in ("static:8", "off"):
        assert moved(scaler, lambda p, g: (p, g)) == pytest.approx(1, rel=1e-5)
        assert moved(scaler, lambda p, g: (p["a"], g["a"])) == pytest.approx(1, rel=1e-5)
        assert moved(scaler, lambda p, g: (p, jax.tree.map(lambda x: 2 * x, g))) == (
            pytest.approx(1, rel=1e-5)
        )
    with pytest.raises(SettingsError, match="max_norm is -1"):
        gl.apply(sgd, params, None, params, result_of(True), max_norm=-1)


def test_the_clip_coefficient_is_torchs_to_the_bit():
    """The core's for Python numbers is compared with torch's own where torch is tested."""
    rng = np.random.default_rng(0)
    norms = np.float32(2.0 ** rng.uniform(-4, 12, 5000))
    for most in (1.0, 0.3, 7.1):
        wanted = [clip_coefficient(float(n), most) for n in norms]
        got = jax.jit(jax.vmap(lambda n, most=most: clip_coefficient(n, most, jnp)))(norms)
        assert got.tolist() == wanted
    sgd, params = optax.sgd(1.0), jnp.zeros(1)
    for norm in norms[:5]:
        run = gl.value_and_grad(lambda p, norm=norm: (p * norm).sum())
        _, grads, _, result = run(gl.Scaler("static:8"), params)
        moved, _ = gl.apply(sgd, grads, sgd.init(params), params, result, max_norm=0.3)
        tx = gl.wrap(sgd, "static:1", max_norm=0.3)
        other, _ = tx.update(jnp.array([norm]), tx.init(params), params)
        wanted = -norm * np.float32(clip_coefficient(float(norm), 0.3))
        assert float(moved[0]) == float(other[0]) == float(wanted)

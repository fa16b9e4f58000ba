"""A step that is not finite changes nothing, and says so."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jax import OPT, X, bits, jitted, start

import gradlift.jax as gl
from gradlift import Cause


def test_skipped_steps_change_no_bit_and_tell_why():
    params, state, scaler = start()
    params["w"] = params["w"].at[0, 0].set(-0.0)
    params, state, scaler, _ = jitted(params, state, scaler, X)
    before = bits((params, state))
    for times, cause, scale in [(1e30, Cause.OVERFLOW, 8.0), (jnp.nan, Cause.LOSS_NONFINITE, 8.0)]:
        params, state, scaler, result = jitted(params, state, scaler, X, times)
        assert bits((params, state)) == before
        assert Cause(int(result.cause)) is cause
        assert float(scaler.state.scale) == scale
        assert not bool(result.stepped)
        assert math.isnan(float(result.grad_norm))
    *_, result = jitted(params, state, scaler, X)
    assert bool(result.stepped)
    assert float(result.scale) == 8.0


@pytest.mark.parametrize("jit", [True, False])
def test_minus_zero_survives_a_skip_on_both_routes(jit):
    params = jnp.array([-0.0, 0.0, 1.0])
    bad = jnp.array([1.0, jnp.inf, jnp.nan])
    run = jax.jit if jit else lambda f: f
    opt = optax.sgd(0.1)

    def route_a(params):
        _, grads, _, result = gl.value_and_grad(lambda p: (p * bad).sum())(gl.Scaler(), params)
        return gl.apply(opt, grads, opt.init(params), params, result)[0]

    tx = gl.wrap(opt)

    def route_b(params):
        updates, _ = tx.update(bad, tx.init(params), params)
        return optax.apply_updates(params, updates)

    assert bits(run(route_a)(params)) == bits(params)
    assert bits(run(route_b)(params)) == bits(params)


def odd_optimizer():
    """State with everything in it: a count, a random key, None, float0, an unused number."""

    def init(params):
        return {
            "count": jnp.zeros((), jnp.int32),
            "key": jax.random.key(0),
            "old": jax.random.PRNGKey(1),
            "none": None,
            "empty": np.zeros(3, jax.dtypes.float0),
            "same": jnp.float32(7),
            "twice": (jnp.zeros(2), jnp.ones(2)),
            "fixed": jnp.zeros(()),
        }

    def update(grads, state, params=None):
        key, _ = jax.random.split(state["key"])
        old, _ = jax.random.split(state["old"])
        both = state["twice"][0] + 1
        moved = {**state, "count": state["count"] + 1, "key": key, "old": old}
        moved = {**moved, "twice": (both, both), "fixed": jnp.ones(())}
        return jax.tree.map(lambda g: -g, grads), moved

    return optax.GradientTransformation(init, update)


def key_bits(state):
    return bits({**state, "key": jax.random.key_data(state["key"])})


@pytest.mark.parametrize("route", ["apply", "wrap"])
@pytest.mark.parametrize("jit", [True, False])
def test_any_state_is_kept_or_moved(route, jit):
    opt = odd_optimizer()
    params = jnp.ones(2)

    def run(state, times):
        if route == "wrap":
            tx = gl.wrap(opt, "static:4")
            held = tx.init(params)._replace(inner=state)
            updates, held = tx.update(times * params, held, params)
            return optax.apply_updates(params, updates), held.inner
        _, grads, _, result = gl.value_and_grad(lambda p: (p * times).sum())(
            gl.Scaler("static:4"), params
        )
        return gl.apply(opt, grads, state, params, result)

    state = opt.init(params)
    kept = {k: v for k, v in state.items() if k != "empty"}

    def without_float0(state, times):
        out, moved = run({**state, "empty": np.zeros(3, jax.dtypes.float0)}, times)
        assert moved.pop("empty").dtype == jax.dtypes.float0
        return out, moved

    go = jax.jit(without_float0) if jit else without_float0
    same, moved = go(kept, jnp.inf)
    assert bits(same) == bits(params)
    assert key_bits(moved) == key_bits(kept)
    new, moved = go(kept, 0.5)
    assert new.tolist() == [0.5, 0.5]
    _, wanted = opt.update(params, kept)
    assert key_bits(moved) == key_bits(wanted)


def test_no_gradients_is_neither():
    scaler = gl.Scaler("dynamic:init_scale=16,growth_interval=1")
    for tree in ({}, {"a": None}, {"a": jnp.zeros((0, 3))}):
        _, _, after, result = jax.jit(gl.value_and_grad(lambda p: jnp.float32(1)))(scaler, tree)
        assert Cause(int(result.cause)) is Cause.NO_GRADIENTS
        assert bits(after.state) == bits(scaler.state)
        assert (int(after.steps), int(after.skipped_steps)) == (1, 0)


def test_without_the_loss_the_cause_is_unknown():
    tx = gl.wrap(OPT, "dynamic:init_scale=16")
    params = jnp.ones(2)
    bad = jnp.array([1.0, jnp.nan])
    _, state = tx.update(bad, tx.init(params), params)
    assert Cause(int(state.result.cause)) is Cause.UNKNOWN_NONFINITE
    assert float(state.scaler.state.scale) == 8.0
    _, state = tx.update(bad, tx.init(params), params, value=jnp.nan)
    assert Cause(int(state.result.cause)) is Cause.LOSS_NONFINITE
    assert float(state.scaler.state.scale) == 16.0

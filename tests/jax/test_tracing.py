"""Under jit and scan, with donated buffers and in optax chains."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.jax import OPT, X, half_loss, start, step
from jax import lax

import gradlift.jax as gl


def test_buffers_can_be_donated_and_nothing_is_copied():
    """Each new moment takes the place of the old one; a second reader would force a copy."""
    params = {"w": jnp.ones((256, 256))}
    state, scaler = OPT.init(params), gl.Scaler("static:4")

    def go(params, state, scaler, grads):
        tx = gl.wrap(OPT, "static:4")
        held = tx.init(params)._replace(inner=state, scaler=scaler)
        updates, held = tx.update(grads, held, params)
        return optax.apply_updates(params, updates), held.inner, held.scaler

    compiled = jax.jit(go, donate_argnums=(0, 1)).lower(params, state, scaler, params).compile()
    text = compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 256 * 4
    assert not [line for line in text.splitlines() if " copy(" in line and "256,256" in line]
    after, *_ = jax.jit(go, donate_argnums=(0, 1))(
        params, state, scaler, {"w": jnp.ones((256, 256))}
    )
    assert float(after["w"][0, 0]) == pytest.approx(0.9 - 0.1 * 1e-4, abs=1e-5)


def test_carried_by_scan_jit_and_a_compiled_step():
    params, state, scaler = start("auto:sharp")

    def body(carry, x):
        *carry, result = step(*carry, x, retries=3)
        return tuple(carry), result

    xs = jax.random.normal(jax.random.key(0), (20, 8))
    (_, _, after), results = jax.jit(lambda c, xs: lax.scan(body, c, xs))(
        (params, state, scaler), xs
    )
    assert results.stepped.shape == (20,)
    assert bool(results.stepped.all())
    assert after.rule == scaler.rule
    compiled = jax.jit(step).lower(params, state, scaler, X).compile()
    again = compiled(*compiled(params, state, scaler, X)[:3], X)
    assert jax.tree.structure(again[2]) == jax.tree.structure(scaler)
    one = jax.jit(lambda *args: step(*args))
    one(*one(params, state, scaler, X)[:3], X)
    assert one._cache_size() == 1  # nothing weak, nothing retraced

    tx = gl.wrap(OPT, "auto", max_norm=1.0)

    def wrapped(carry, x):
        params, state = carry
        loss, grads = jax.value_and_grad(gl.scaled(half_loss, state))(params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), state.result.stepped

    (_, state), stepped = lax.scan(wrapped, (params, tx.init(params)), xs)
    assert stepped.sum() >= 15
    assert isinstance(state, gl.WrapState)


def test_a_wrapped_optimizer_sits_in_a_chain_and_passes_arguments_on():
    seen = []

    def update(grads, state, params=None, *, value, temperature):
        seen.append((value, temperature))
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx = optax.chain(gl.wrap(inner, "static:8"), optax.scale(-1.0))
    state = tx.init(jnp.ones(2))
    updates, _ = tx.update(jnp.ones(2), state, jnp.ones(2), value=1.0, temperature=3)
    assert updates.tolist() == [-1.0, -1.0]
    assert set(seen) == {(1.0, 3)}
    _, grads, _, result = gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), jnp.ones(2))
    after, _ = gl.apply(inner, grads, (), jnp.ones(2), result, value=2.0, temperature=4)
    assert after.tolist() == [2.0, 2.0]
    assert (2.0, 4) in seen


def test_a_fresh_state_can_be_donated():
    tx, params = gl.wrap(optax.adam(0.1), "dynamic"), {"w": jnp.ones(2)}

    def body(carry, x):
        params, state = carry
        updates, state = tx.update({"w": x * jnp.ones(2)}, state, params)
        return (optax.apply_updates(params, updates), state), None

    scanned = jax.jit(lambda c, x: jax.lax.scan(body, c, x)[0], donate_argnums=0)
    params, state = scanned((params, tx.init(params)), jnp.ones(3))
    assert bool(state.result.stepped)


def test_an_optimizer_that_takes_no_value_is_not_given_one():
    def update(grads, state, params=None, *, mine=1.0):
        return jax.tree.map(lambda g: -g, grads), state

    plain = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, params = gl.wrap(plain, "static:8"), jnp.ones(2)
    updates, _ = tx.update(jnp.ones(2), tx.init(params), params, value=1.0)
    assert updates.tolist() == [-1.0, -1.0]

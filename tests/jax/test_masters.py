"""16-bit parameters and their FP32 masters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.jax import OPT, bits, result_of

import gradlift.jax as gl
from gradlift.errors import MisuseError


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("route", ["apply", "wrap"])
def test_masters(dtype, route):
    """Steps too small for 16 bits add up; a skipped step leaves masters and weights alone."""
    params = {"w": jnp.full(3, 1.0, dtype), "wide": jnp.ones(2)}
    tx = gl.master(optax.sgd(1.0))
    wrapped = gl.wrap(tx, "static:8")

    @jax.jit
    def go(params, state, times):
        def loss(p):
            return (p["w"].astype(jnp.float32).sum() + p["wide"].sum()) * times * 2.0**-14

        if route == "apply":
            _, grads, _, result = gl.value_and_grad(loss)(gl.Scaler("static:8"), params)
            return gl.apply(tx, grads, state, params, result)
        held = wrapped.init(params)._replace(inner=state)
        _, grads, _, _ = gl.value_and_grad(loss)(held.scaler, params)
        updates, held = wrapped.update(grads, held, params)
        return optax.apply_updates(params, updates), held.inner

    state = tx.init(params)
    for _ in range(256):
        params, state = go(params, state, -1.0)
    exact = 1 + 256 * 2.0**-14
    assert state.masters["w"].tolist() == [exact] * 3 == [params["wide"][0]] * 3
    assert bits(params["w"]) == bits(state.masters["w"].astype(dtype))
    before = bits((params, state))
    assert bits(go(params, state, jnp.inf)) == before


def test_apply_rounds_masters_where_an_addition_would_miss():
    """A weight that shrinks 2^30-fold: the difference to it is not exact in float32."""
    params, tx = jnp.array([1000.0], jnp.float16), gl.master(optax.sgd(1.0))
    state = tx.init(params)._replace(masters=jnp.array([2.0**-20]))
    updates, _ = tx.update(jnp.zeros(1), state, params)
    assert float(optax.apply_updates(params, updates)[0]) == 0.0
    after, moved = gl.apply(tx, jnp.zeros(1), state, params, result_of(True))
    assert float(after[0]) == 2.0**-20 == float(moved.masters[0])
    updates, _ = tx.update(jnp.zeros(1), state, jnp.zeros(1, jnp.float16))  # the step after it
    assert float(updates[0]) == 2.0**-20


def test_16_bit_parameters_without_masters_are_refused_by_name():
    params = {"w": jnp.ones(2, jnp.float16)}
    state = OPT.init(params)
    _, grads, _, result = gl.value_and_grad(lambda p: p["w"].astype(jnp.float32).sum())(
        gl.Scaler("static:8"), params
    )
    with pytest.raises(MisuseError, match=r"mu\['w'\] from float16.*master\(optimizer\)"):
        gl.apply(OPT, grads, state, params, result)


def test_what_follows_masters_in_a_chain_counts():
    optimizer = optax.chain(gl.master(optax.sgd(1.0)), optax.keep_params_nonnegative())
    params = jnp.array([0.5, 2.0], jnp.float16)
    loss_fn = lambda p: p.astype(jnp.float32).sum()
    _, grads, _, result = gl.value_and_grad(loss_fn)(gl.Scaler("static:8"), params)
    moved, _ = gl.apply(optimizer, grads, optimizer.init(params), params, result)
    assert moved.tolist() == [0.0, 1.0]


def test_masters_of_float32_leaves_can_be_donated_with_them():
    optimizer = gl.master(optax.adam(0.1))
    params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(3)}
    state = optimizer.init(params)

    def step(params, state, scaler):
        loss_fn = lambda p: p["w"].astype(jnp.float32).sum() + p["norm"].sum()
        _, grads, scaler, result = gl.value_and_grad(loss_fn)(scaler, params)
        return (*gl.apply(optimizer, grads, state, params, result), scaler)

    params, state, _ = jax.jit(step, donate_argnums=(0, 1))(params, state, gl.Scaler("static:8"))
    assert (params["norm"] < 1).all()


@pytest.mark.parametrize(
    ("dtype", "start", "by"), [("float16", 65000, 1e3), ("bfloat16", 3.38e38, 2e37)]
)
@pytest.mark.parametrize("route", ["apply", "wrap", "alone"])
def test_a_weight_whose_master_leaves_its_range_stays_at_the_largest_number(
    dtype, start, by, route
):
    params = jnp.array([start, -start, 1.0], dtype)
    grads = jnp.array([-by, by, 0.0], jnp.float32)
    tx = gl.master(optax.sgd(1.0))
    most = float(jnp.finfo(dtype).max)

    @jax.jit
    def go(params, state):
        if route == "wrap":
            updates, state = wrapped.update(grads, state, params)
        elif route == "alone":
            updates, state = tx.update(grads, state, params)
        else:
            result = gl.value_and_grad(lambda w: w.sum())(gl.Scaler("static:1"), jnp.ones(1))[3]
            return gl.apply(tx, grads, state, params, result)
        return optax.apply_updates(params, updates), state

    wrapped = gl.wrap(tx, "static:1")
    state = (wrapped if route == "wrap" else tx).init(params)
    for _ in range(3):
        params, state = go(params, state)
        assert jnp.isfinite(params).all()
    assert params.tolist() == [most, -most, 1.0]

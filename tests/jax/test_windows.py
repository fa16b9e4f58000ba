"""What belongs to one step: micro-batches, several losses, several optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jax import X, bits, half_loss, start
from jax import lax

import gradlift.jax as gl
from gradlift import Cause
from gradlift.errors import MisuseError


# Accumulation, several losses
def test_accumulation_is_the_mean_at_one_scale():
    params, _, _ = start()
    scaler = gl.Scaler("dynamic:init_scale=16,growth_interval=1")
    batches = jnp.stack([X, 2 * X, -X, X / 2])
    run = gl.value_and_grad(half_loss, accumulate=True)
    loss, grads, after, result = jax.jit(run)(scaler, params, batches, 1.0)
    losses, parts = zip(*(jax.value_and_grad(half_loss)(params, x) for x in batches), strict=True)
    assert float(loss) == pytest.approx(float(sum(losses)) / 4, rel=1e-6)
    mean = jax.tree.map(lambda *g: sum(g) / 4, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6), grads, mean)
    assert float(after.state.scale) == 32.0  # one window, one step
    bad = batches.at[2, 0].set(6e4)
    _, _, after, result = jax.jit(run)(scaler, params, bad, 1.0)
    assert not bool(result.stepped)
    assert float(after.state.scale) in (8.0, 16.0)


def test_some_bad_losses_are_the_cause_only_where_the_gradients_show_it():
    """As in every adapter: loss_blamed(loss_level(flags), nonfinite)."""

    def loss(w, x, hidden):
        shown = (w * x).sum()
        return shown + lax.stop_gradient(hidden)  # spoils the loss and no gradient

    run = jax.jit(gl.value_and_grad(loss, accumulate=True))
    scaler = gl.Scaler("dynamic:init_scale=16")
    good, bad = jnp.zeros(3), jnp.array([0, jnp.nan, 0])
    x = jnp.ones((3, 2))
    for inputs, hidden, cause, scale in [
        (x, bad, Cause.NONE, 16.0),
        (x, jnp.full(3, jnp.nan), Cause.LOSS_NONFINITE, 16.0),
        (x.at[1, 0].set(jnp.nan), good, Cause.LOSS_NONFINITE, 16.0),
    ]:
        _, _, after, result = run(scaler, jnp.ones(2), inputs, hidden)
        assert Cause(int(result.cause)) is cause
        assert float(after.state.scale) == scale


def test_accumulation_with_aux_keys_keywords_and_retries():
    def loss(w, x, *, key, flag):
        noise = jax.random.uniform(key, ()) if flag else 0
        return (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum() + noise, x

    keys = jax.random.split(jax.random.key(0), 3)
    run = gl.value_and_grad(loss, has_aux=True, accumulate=True, retries=20)
    go = jax.jit(lambda s, w, x, k: run(s, w, x, key=k, flag=True))
    x = jnp.arange(6.0).reshape(3, 2)
    (value, aux), grads, _, result = go(
        gl.Scaler("auto:sharp,init_scale=2^32"), jnp.ones(2), x, keys
    )
    assert aux.shape == (3, 2)
    assert grads.tolist() == [2.0, 3.0]
    assert int(result.retries) > 0
    noise = np.mean([float(jax.random.uniform(k, ())) for k in keys])
    assert float(value) == pytest.approx(5 + noise, rel=1e-6)
    with pytest.raises(MisuseError, match="split it"):
        run(gl.Scaler(), jnp.ones(2), x, key=jax.random.key(0), flag=True)
    with pytest.raises(MisuseError, match=r"different lengths: 3 .*2"):
        run(gl.Scaler(), jnp.ones(2), x, key=keys[:2], flag=True)
    with pytest.raises(MisuseError, match="first axis is empty"):
        run(gl.Scaler(), jnp.ones(2), x[:0], key=keys[:0], flag=True)


def test_several_losses_each_with_its_scale():
    params, sgd = jnp.ones(2), optax.sgd(1.0)

    @jax.jit
    def go(params, one, two, x, y):
        _, g1, one, r1 = gl.value_and_grad(lambda p: (p * x).sum())(one, params)
        _, g2, two, r2 = gl.value_and_grad(lambda p: (p * y).sum())(two, params)
        grads = jax.tree.map(jnp.add, g1, g2)
        params, _ = gl.apply(sgd, grads, sgd.init(params), params, [r1, r2], max_norm=10.0)
        return params, one, two

    one, two = gl.Scaler("dynamic:init_scale=8"), gl.Scaler("dynamic:init_scale=4")
    after, *_ = go(params, one, two, 0.25, 0.5)
    assert after.tolist() == [0.25, 0.25]
    after, one, two = go(params, one, two, 0.25, jnp.inf)
    assert bits(after) == bits(params)
    assert (float(one.state.scale), float(two.state.scale)) == (8.0, 4.0)  # the loss was infinite
    with pytest.raises(MisuseError, match="result of value_and_grad"):
        gl.apply(sgd, params, None, params, [])

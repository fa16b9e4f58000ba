"""The same batch again at a lower scale: no batch is lost, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.jax import X, bits, jitted, start, step

import gradlift.jax as gl
import gradlift.numpy
from gradlift import Cause, rules
from gradlift.errors import MisuseError


# Retries
def reference(rule, losses, retries):
    """The same batches through the NumPy adapter: what must come out, from the core's `decide`."""
    scaler = gradlift.numpy.Scaler(rule)
    weights = {"w": np.ones(4, np.float32)}
    told = []
    for gradient in losses:

        def compute(scale, gradient=gradient):
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = np.float16(gradient * np.float32(scale)).astype(np.float32)
            return float(np.sum(gradient)), {"w": scaled}

        result = scaler.train_step(compute, weights, lambda w, g: None, retries=retries)
        skips = int(scaler.state.skips)
        told.append((result.stepped, result.cause, result.scale, result.retries, skips))
    return told, scaler.rule.dump(scaler.state)


@jax.custom_vjp
def given(params, gradient):
    return gradient.sum()


given.defvjp(
    lambda params, gradient: (gradient.sum(), gradient),
    lambda gradient, up: ((gradient * up).astype(jnp.float16).astype(jnp.float32), None),
)


@pytest.mark.parametrize("retries", [1, 8])
@pytest.mark.parametrize(
    "rule",
    [
        "auto",
        "auto:init_scale=2^32",
        "auto:init_scale=1",
        "dynamic:init_scale=2^24,growth_interval=2",
        "megatron:growth_interval=3",
        "static:2^20",
    ],
)
def test_retries_are_the_cores(rule, retries):
    rng = np.random.default_rng(0)
    batches = [np.float32(rng.standard_normal(4) * 2.0 ** rng.normal(-6, 8)) for _ in range(40)]
    batches[7][2] = np.nan  # the loss is NaN at any scale, so it is not tried again
    batches[9][:] = 0
    told, state = reference(rule, batches, retries)
    compiled = jax.jit(gl.value_and_grad(given, retries=retries))
    scaler = gl.Scaler(rule, retries=True)
    for batch, wanted in zip(batches, told, strict=True):
        _, grads, scaler, r = compiled(scaler, jnp.ones(4), jnp.asarray(batch))
        seen = bool(r.stepped), Cause(int(r.cause)), float(r.scale), int(r.retries)
        assert (*seen, int(scaler.state.skips)) == wanted
        if r.stepped:
            with np.errstate(over="ignore"):
                expected = np.float16(batch * np.float32(r.scale)).astype(np.float32) / r.scale
            assert bits(grads) == bits(np.asarray(expected))
    assert scaler.rule.dump(jax.device_get(scaler.state)) == state
    assert any(tries > 0 for *_, tries, _ in told) == (rule != "static:2^20")


def test_retries_lose_no_batch_and_equal_a_run_that_started_there():
    params, state, scaler = start("auto:sharp,init_scale=2^32")
    after = jitted(params, state, scaler, X, retries=8)
    assert bool(after[3].stepped)
    assert int(after[3].retries) > 0
    there = gl.Scaler(rules.Static(float(after[3].scale)))
    wanted = jitted(params, state, there, X)
    assert bits(after[:2]) == bits(wanted[:2])
    eager = step(params, state, scaler, X, retries=8)
    assert bits(eager[2]) == bits(after[2])


def test_retries_carry_aux():
    def loss(params, x):
        out = (params["w"].astype(jnp.float16) * x).astype(jnp.float32).sum()
        return out, {"n": params["n"] + 1, "weak": 3, "out": out, "none": None}

    @jax.jit
    def allowed(scaler, w, x):
        (value, aux), grads, scaler, result = gl.value_and_grad(
            lambda w, x: loss({"w": w, "n": jnp.arange(3)}, x), has_aux=True, retries=20
        )(scaler, w, x)
        return value, aux, grads, result

    value, aux, grads, result = allowed(
        gl.Scaler("auto:sharp,init_scale=2^32"), jnp.ones(2), jnp.float16(2)
    )
    assert float(value) == 4.0 == float(aux["out"])
    assert aux["n"].tolist() == [1, 2, 3]
    assert int(aux["weak"]) == 3
    assert aux["none"] is None
    assert grads.tolist() == [2.0, 2.0]
    assert int(result.retries) > 0


@pytest.mark.parametrize("jit", [True, False])
def test_differentiating_a_retry_says_that_it_cannot(jit):
    def outer(w):
        run = gl.value_and_grad(lambda w: jnp.square(w).sum(), retries=2)
        run = jax.jit(run) if jit else run
        loss, grads, _, _ = run(gl.Scaler("static:8"), w)
        return loss + grads.sum()

    for transform in (jax.grad(outer), lambda w: jax.jvp(outer, (w,), (w,)), jax.jacrev(outer)):
        with pytest.raises(MisuseError, match="retries=0"):
            transform(jnp.ones(2))

    def closed_over(w):  # the function brings the value along by itself
        run = gl.value_and_grad(lambda v: (v * w).sum(), retries=2)
        return run(gl.Scaler("static:8"), jnp.ones(2))[1].sum()

    with pytest.raises(MisuseError, match="retries=0"):
        jax.grad(closed_over)(jnp.ones(2))


def test_without_retries_it_can_be_differentiated():
    def outer(w):
        _, grads, _, _ = gl.value_and_grad(lambda w: (w**3).sum())(gl.Scaler("static:8"), w)
        return grads.sum()

    assert jax.grad(outer)(jnp.array([1.0, 2.0])).tolist() == [6.0, 12.0]


def hidden(w, x):
    """Activation gradients 17 bits above those of the weights: they overflow unseen."""
    return ((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32) * 0.5).sum()


@pytest.mark.parametrize("retries", range(7))
def test_a_sound_batch_is_never_lost_by_trying_a_higher_scale(retries):
    run = jax.jit(gl.value_and_grad(hidden, retries=retries))
    *_, result = run(gl.Scaler("auto:sharp"), jnp.ones(4), jnp.full(4, 6e-6))
    assert bool(result.stepped)
    assert int(result.retries) <= retries

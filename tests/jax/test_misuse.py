"""Calls and settings that cannot work are refused with what to do instead."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.jax import OPT

import gradlift.jax as gl
from gradlift.errors import MisuseError, SettingsError, StateError

# Mixing routes, tracing, carrying
CLIP = optax.clip_by_global_norm(1.0)


def routes(optimizer, state, loss):
    """Weights after a step, each by another mixture of scales, all at 2^16."""
    other = gl.wrap(optimizer, "static:2^16").init(jnp.ones(2))
    chained = gl.scaled(gl.scaled(loss, state), other)  # twice
    _, true, _, _ = gl.value_and_grad(loss)(state.scaler, jnp.ones(2))
    yield "one", jax.grad(gl.scaled(loss, state))(jnp.ones(2))
    yield "another", jax.grad(gl.scaled(loss, other))(jnp.ones(2))
    yield "twice", jax.grad(chained)(jnp.ones(2))
    yield "never", jax.grad(loss)(jnp.ones(2))
    yield "route A's", true
    yield (
        "in a jit of its own",
        jax.jit(lambda s, p: jax.grad(gl.scaled(loss, s))(p))(state, jnp.ones(2)),
    )


def test_no_mixture_of_scales_moves_the_weights_elsewhere():
    """The scale exists inside `scaled` only, so what leaves it is the true gradient."""
    loss = lambda p: jnp.square(p).sum() * 3
    tx = gl.wrap(optax.sgd(0.125), "static:2^16")
    state = tx.init(jnp.ones(2))
    for how, grads in routes(optax.sgd(0.125), state, loss):
        assert grads.tolist() == [6.0, 6.0], how
        updates, _ = tx.update(grads, state, jnp.ones(2), value=loss(jnp.ones(2)))
        assert updates.tolist() == [-0.75, -0.75], how
        clipped, _ = tx.update(CLIP.update(grads, CLIP.init(None))[0], state, jnp.ones(2))
        assert clipped.tolist() == pytest.approx([-0.125 / 2**0.5] * 2), how


@pytest.mark.parametrize(
    "front",
    [
        lambda tx: optax.chain(CLIP, tx),
        lambda tx: optax.chain(optax.clip(1.0), tx, optax.scale(2.0)),
        lambda tx: optax.chain(optax.chain(optax.identity(), tx)),
        lambda tx: optax.named_chain(("a clip", CLIP), ("tx", tx)),
    ],
    ids=["norm", "value", "inner", "named"],
)
def test_a_transform_in_front_of_a_wrapped_optimizer_is_refused(front):
    """`clip` would turn an overflow into 1.0, and the step would be applied."""
    tx = front(gl.wrap(optax.sgd(0.1), "static:8"))
    state = tx.init(jnp.ones(2))
    with pytest.raises(MisuseError, match=r"Put the chain inside: wrap\(optax.chain\("):
        jax.grad(gl.scaled(jnp.sum, state))(jnp.ones(2))


@pytest.mark.parametrize(
    "right",
    [
        lambda: gl.wrap(optax.chain(CLIP, optax.sgd(0.125)), "static:2^16"),
        lambda: gl.wrap(optax.sgd(0.125), "static:2^16", max_norm=1.0),
        lambda: optax.chain(gl.wrap(optax.chain(CLIP, optax.sgd(0.125)), 2.0**16), optax.scale(1)),
    ],
    ids=["chain inside", "max_norm", "first of a chain"],
)
def test_the_right_chains_clip_at_the_true_norm(right):
    tx = right()
    state = tx.init(jnp.ones(2))
    grads = jax.grad(gl.scaled(lambda p: jnp.square(p).sum() * 3, state))(jnp.ones(2))
    updates, _ = tx.update(grads, state, jnp.ones(2))
    assert updates.tolist() == pytest.approx([-0.125 / 2**0.5] * 2, rel=1e-5)


def test_a_float16_parameter_is_refused_by_name_and_takes_the_other_way():
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = gl.wrap(gl.master(optax.sgd(1.0)), "static:2^24")
    state = tx.init(params)
    loss = lambda p: p["w"].astype(jnp.float32).sum() * 2.0**-26
    with pytest.raises(MisuseError, match=r"\['w'\] is float16.*value_and_grad\(fun\)"):
        jax.grad(gl.scaled(loss, state))(params)
    _, grads, _, _ = gl.value_and_grad(loss)(state.scaler, params)
    _, state = tx.update(grads, state, params)
    assert grads["w"].tolist() == [2.0**-26] * 2  # float16 would have made 0 of it
    assert bool(state.result.stepped)


def test_a_state_without_a_scaler():
    with pytest.raises(MisuseError, match="holds 0 scalers"):
        gl.scaled(jnp.sum, OPT.init(jnp.ones(2)))


def test_marks_leave_nothing_behind():
    from gradlift.jax.application import _marks

    held = len(_marks)
    for _ in range(3):
        gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), jnp.ones(2))
        jax.jit(gl.value_and_grad(lambda p: p.sum()))(gl.Scaler("static:8"), jnp.ones(2))
    import gc

    gc.collect()
    assert len(_marks) <= held + 1


# Bad input
def test_leaves_that_are_no_gradients_are_named():
    tx = gl.wrap(optax.sgd(0.1), "static:8")
    state = tx.init({})
    for bad, said in [
        (jnp.arange(3), "int32"),
        (jnp.ones(2, complex), "complex64"),
        ("text", "a str, expected an array"),
        (jnp.ones(2, bool), "bool"),
    ]:
        grads = {"layer": [jnp.ones(2), {"kernel": bad}]}
        with pytest.raises(MisuseError, match=rf"\['layer'\]\[1\]\['kernel'\] is .*{said}"):
            tx.update(grads, state, grads)
    with pytest.raises(MisuseError, match="the gradient at the root is int32"):
        jax.jit(tx.update)(jnp.arange(3), state, jnp.arange(3))
    with pytest.raises(MisuseError, match=r"parameter at \['n'\] is int32, which has no gradient"):
        jax.jit(gl.value_and_grad(lambda p: p["w"].sum()))(
            gl.Scaler(), {"w": jnp.ones(2), "n": jnp.arange(2)}
        )
    with pytest.raises(MisuseError, match=r"\['w'\] is complex64"):
        jax.jit(gl.value_and_grad(lambda p: jnp.abs(p["w"]).sum()))(
            gl.Scaler(), {"w": jnp.ones(2, complex)}
        )


def test_losses_that_are_no_losses():
    run = lambda f: jax.jit(gl.value_and_grad(f))(gl.Scaler("auto"), jnp.ones(3))
    with pytest.raises(MisuseError, match=r"shape \(3,\), expected a scalar: take its mean"):
        run(lambda w: w)
    with pytest.raises(MisuseError, match=r"shape \(1,\)"):
        run(lambda w: w[:1])
    with pytest.raises(MisuseError, match="the loss is int32"):
        run(lambda w: w.astype(int).sum())
    with pytest.raises(MisuseError, match=r"returns \(loss, aux\), this one returned"):
        jax.jit(gl.value_and_grad(lambda w: w.sum(), has_aux=True))(gl.Scaler(), jnp.ones(3))
    with pytest.raises(MisuseError, match="the first argument is the scaler"):
        gl.value_and_grad(lambda w: w.sum())(jnp.ones(3))
    state = gl.wrap(optax.sgd(0.1)).init(jnp.ones(2))
    with pytest.raises(MisuseError, match="shape"):
        gl.scaled(lambda p: p, state)(jnp.ones(2))


def test_settings_that_cannot_work():
    with pytest.raises(SettingsError, match="did you mean 'auto'"):
        gl.Scaler("autoo")
    with pytest.raises(SettingsError, match="did you mean 'dynamic'"):
        gl.wrap(optax.sgd(0.1), "dynamik")
    for retries in (-1, 1.5, True, "3"):
        with pytest.raises(SettingsError, match="retries is"):
            gl.value_and_grad(lambda w: w, retries=retries)
    with pytest.raises(SettingsError, match="max_norm is 0"):
        gl.wrap(optax.sgd(0.1), max_norm=0)


def test_states_that_cannot_be_skipped_or_loaded():
    grow = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, (*s, g)))
    _, grads, _, result = gl.value_and_grad(lambda w: w.sum())(gl.Scaler("static:8"), jnp.ones(2))
    with pytest.raises(MisuseError, match="another tree"):
        gl.apply(grow, grads, (), jnp.ones(2), result)
    with pytest.raises(MisuseError, match="needs the parameters"):
        tx = gl.master(optax.sgd(0.1))
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    good = gl.Scaler("dynamic").state_dict()
    own = good["gradlift"]
    for damage, said in [
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": "8"}, "expected a number"),
        ({"_growth_tracker": 1.5}, "clean is 1.5"),
        ({"gradlift": {**own, "rule": "headroom"}}, "saved with the rule 'headroom'"),
        ({"gradlift": {**own, "schema": 99}}, "unknown schema"),
        ({"gradlift": {k: v for k, v in own.items() if k != "skips"}}, "lacks 'skips'"),
    ]:
        with pytest.raises(StateError, match=said):
            gl.Scaler("dynamic").load_state_dict({**good, **damage})
    with pytest.raises(StateError, match="lacks 'scale'"):
        gl.Scaler("dynamic").load_state_dict({k: v for k, v in good.items() if k != "scale"})
    with pytest.raises(StateError, match="a scaler state is a dict, this is list"):
        gl.Scaler("dynamic").load_state_dict([])


@pytest.mark.parametrize("text", ["half=f16", "params=int8,compute=f16", "c=", "params:f16", "p=x"])
def test_policies_that_mean_nothing(text):
    with pytest.raises(SettingsError):
        gl.Policy(text)


def test_policies_of_two_types():
    with pytest.raises(SettingsError, match="three types"):
        gl.Policy(jnp.float32, jnp.float16)


def test_apply_refuses_what_is_no_gradient_by_name():
    params = {"w": jnp.ones(2)}
    *_, result = gl.value_and_grad(lambda p: p["w"].sum())(gl.Scaler("static:8"), params)
    optimizer = optax.sgd(0.1)
    with pytest.raises(MisuseError, match=r"\['w'\] is int32"):
        gl.apply(optimizer, {"w": jnp.arange(2)}, optimizer.init(params), params, result)

"""jmp's and flax's loops after a change of import, beside the originals."""

import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale

import gradlift.jax as gl
from gradlift.errors import MisuseError

OPT = optax.adam(0.1)


def loss_fn(params, x):
    out = (x.astype(jnp.float16) * params["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.square(out).sum()


def jmp_loop(lib, xs, **settings):
    """A loop as jmp's README writes it; `lib` is jmp or gradlift.jax."""
    params = {"w": jnp.arange(1.0, 5.0)}
    state, scale = OPT.init(params), lib.DynamicLossScale(jnp.asarray(2.0**15), **settings)

    @jax.jit
    def step(params, state, scale, x):
        grads = jax.grad(lambda p: scale.scale(loss_fn(p, x)))(params)
        grads = scale.unscale(grads)
        finite = lib.all_finite(grads)
        scale = scale.adjust(finite)
        updates, new_state = OPT.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        params, state = lib.select_tree(finite, (new_params, new_state), (params, state))
        return params, state, scale, finite

    told = []
    for x in xs:
        params, state, scale, finite = step(params, state, scale, x)
        held = params["w"].tolist(), float(scale.loss_scale), int(scale.counter), bool(finite)
        told.append(held)
    return told


@pytest.mark.parametrize("settings", [{"period": 3}, {"period": 2, "factor": 4}])
def test_jmps_loop_gives_jmps_numbers(settings):
    xs = (
        jax.random.normal(jax.random.key(0), (60, 4))
        * jnp.where(jnp.arange(60) % 7 == 3, 300, 1)[:, None]
    )
    ours, theirs = jmp_loop(gl, xs, **settings), jmp_loop(jmp, xs, **settings)
    assert ours == theirs
    assert len({scale for _, scale, *_ in ours}) > 3


def test_every_field_goes_through_jit():
    """jmp loses min_loss_scale there, and cannot be passed to a compiled function twice."""
    scale = gl.DynamicLossScale(jnp.float32(8), period=7, factor=4, min_loss_scale=jnp.float32(4))
    adjust = jax.jit(lambda s, finite: s.adjust(finite))
    compiled = adjust.lower(scale, jnp.array(False)).compile()
    for _ in range(3):
        scale = compiled(scale, jnp.array(False))
    assert float(scale.loss_scale) == 4.0
    assert (scale.period, scale.factor, float(scale.min_loss_scale)) == (7, 4, 4.0)
    lost = jax.jit(lambda s: s)(jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(4)))
    assert float(lost.min_loss_scale) == 1.0  # the peer's fault that is mended here
    again = pickle.loads(pickle.dumps(scale))
    assert jax.tree.leaves(again) == jax.tree.leaves(scale)

    def body(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale.loss_scale

    _, scales = jax.lax.scan(body, gl.DynamicLossScale(2.0**10, period=1), jnp.array([True, False]))
    assert scales.tolist() == [2.0**11, 2.0**10]


@pytest.mark.parametrize("name", ["NoOpLossScale", "StaticLossScale"])
def test_scales_that_stay(name):
    arguments = () if name == "NoOpLossScale" else (jnp.float32(8),)
    ours, theirs = getattr(gl, name)(*arguments), getattr(jmp, name)(*arguments)
    tree = {"a": jnp.float16(0.5), "b": [jnp.ones(2)]}
    for method in ("scale", "unscale"):
        a, b = getattr(ours, method)(tree), getattr(theirs, method)(tree)
        assert jax.tree.map(lambda x: (x.tolist(), x.dtype), a) == jax.tree.map(
            lambda x: (x.tolist(), x.dtype), b
        )
    assert ours.adjust(jnp.array(False)) is ours
    assert float(ours.loss_scale) == float(theirs.loss_scale)
    assert isinstance(ours, gl.LossScale)
    jax.jit(lambda s: s.scale(jnp.ones(2)))(ours)


def test_all_finite_and_select_tree_are_jmps():
    good = {"a": jnp.ones(3), "n": jnp.arange(2), "c": jnp.ones(2, complex), "e": jnp.zeros(0)}
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        for spoiled in ({**good, "a": jnp.array([1.0, bad])}, {**good, "c": jnp.array([1j * bad])}):
            assert bool(gl.all_finite(spoiled)) == bool(jmp.all_finite(spoiled)) is False
    for tree in (good, {}, {"a": jnp.full(9, 3e38)}, [jnp.float16(65504)]):
        assert bool(gl.all_finite(tree)) == bool(jmp.all_finite(tree)) is True
    a, b = {"x": jnp.ones(2), "n": jnp.arange(2)}, {"x": -jnp.zeros(2), "n": jnp.ones(2, int)}
    for pred in (jnp.array(True), jnp.array(False)):
        ours, theirs = gl.select_tree(pred, a, b), jmp.select_tree(pred, a, b)
        assert jax.tree.map(lambda x: x.tobytes(), jax.device_get(ours)) == jax.tree.map(
            lambda x: x.tobytes(), jax.device_get(theirs)
        )
    for pred in (jnp.array([True]), jnp.array(1)):
        with pytest.raises(MisuseError, match="expected boolean scalar"):
            gl.select_tree(pred, a, b)


@pytest.mark.parametrize(
    "text",
    [
        "params=float32,compute=float16,output=float32",
        "p=f32,c=bf16,o=full",
        "c=f16",
        "p=f16",
        "p=f16,c=bf16",
        "half",
        "full",
        "float16",
        "bfloat16",
    ],
)
def test_policies_are_jmps(text):
    ours, theirs = gl.get_policy(text), jmp.get_policy(text)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == getattr(theirs, field)
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "np": np.ones(2, np.float32), "py": 1.5}
    for cast in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        a, b = getattr(ours, cast)(tree), getattr(theirs, cast)(tree)
        kinds = functools.partial(jax.tree.map, lambda x: getattr(x, "dtype", type(x)))
        assert kinds(a) == kinds(b)
    assert ours == gl.Policy(str(ours)) == gl.Policy(text)
    assert ours == gl.Policy(ours.param_dtype, ours.compute_dtype, ours.output_dtype)
    wide = ours.with_output_dtype(jnp.float32)
    assert wide.output_dtype == theirs.with_output_dtype(jnp.float32).output_dtype


def test_the_rest_of_jmp():
    assert gl.half_dtype() == jmp.half_dtype()
    assert gl.cast_to_half(jnp.ones(2)).dtype == jmp.cast_to_half(jnp.ones(2)).dtype
    assert gl.cast_to_full(jnp.ones(2, jnp.float16)).dtype == jnp.float32
    policy = gl.Policy("half")
    assert jax.jit(lambda p: p)({"policy": policy})["policy"] == policy  # carried, not traced
    assert set(jmp.__all__) <= set(gl.__all__)


# flax


def flax_loop(cls, xs, **settings):
    """A loop as flax's examples write it."""
    params = {"w": jnp.arange(1.0, 5.0)}
    state, scale = OPT.init(params), cls(**settings)

    @jax.jit
    def step(params, state, scale, x):
        grad_fn = scale.value_and_grad(lambda p: (loss_fn(p, x), x.sum()), has_aux=True)
        scale, finite, (loss, aux), grads = grad_fn(params)
        updates, new_state = OPT.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jax.tree.map(functools.partial(jnp.where, finite), new, (params, state))
        return params, state, scale, (finite, loss, aux)

    told = []
    for x in xs:
        params, state, scale, (finite, _loss, aux) = step(params, state, scale, x)
        told.append((params["w"].tolist(), float(scale.scale), bool(finite), float(aux)))
    return told, scale


def test_flaxs_loop_gives_flaxs_numbers():
    """But for the step on which the scale grows: an interval of N here is one of N - 1 there."""
    xs = (
        jax.random.normal(jax.random.key(1), (60, 4))
        * jnp.where(jnp.arange(60) % 9 == 4, 500, 1)[:, None]
    )
    how = {"growth_factor": 4.0, "backoff_factor": 0.25, "scale": 2.0**10}
    ours, last = flax_loop(gl.DynamicScale, xs, growth_interval=4, **how)
    theirs, peer = flax_loop(dynamic_scale.DynamicScale, xs, growth_interval=3, **how)
    assert [rest for _, *rest in ours] == [rest for _, *rest in theirs]
    weights = [[params for params, *_ in told] for told in (ours, theirs)]
    np.testing.assert_allclose(*weights, atol=1e-6)  # XLA contracts multiply-adds differently
    assert len({scale for _, scale, *_ in ours}) > 3
    assert int(last.fin_steps) == int(peer.fin_steps)


def test_flaxs_fields():
    ours, theirs = gl.DynamicScale(), dynamic_scale.DynamicScale()
    for field in ("growth_factor", "backoff_factor", "growth_interval", "fin_steps", "scale"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.minimum_scale == float(theirs.minimum_scale)
    assert ours.replace(scale=8.0).scale == 8.0
    overflow = lambda w: (w.astype(jnp.float16) * 6e4).astype(jnp.float32).sum()
    for least, held in ((4.0, 4.0), (2.0, 2.0), (None, 2.0)):
        floor = gl.DynamicScale(scale=4.0, minimum_scale=least)
        after, finite, _, _ = floor.value_and_grad(overflow)(jnp.ones(1))
        assert not bool(finite)
        assert float(after.scale) == held
    told = floor.value_and_grad(lambda w: w.sum())(jnp.ones(1))
    assert told.finite.dtype == bool
    assert told._fields == dynamic_scale.DynamicScaleResult._fields


def test_a_non_finite_loss_keeps_flaxs_scale():
    nan_loss = lambda w: (w * jnp.nan).sum()
    ours = gl.DynamicScale().value_and_grad(nan_loss)(jnp.ones(2))
    theirs = dynamic_scale.DynamicScale().value_and_grad(nan_loss)(jnp.ones(2))
    assert not bool(ours.finite)
    assert float(ours.dynamic_scale.scale) == 2.0**16
    assert float(theirs.dynamic_scale.scale) == 2.0**15


def test_odd_numbers_warn():
    for make in (
        lambda: gl.DynamicScale(growth_factor=1.5),
        lambda: gl.StaticLossScale(1000.0),
        lambda: gl.DynamicLossScale(3000.0),
    ):
        with pytest.warns(UserWarning, match="not a power of two") as caught:
            make()
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make()  # once is enough

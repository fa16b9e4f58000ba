"""One look at the gradients, exactly; and input that cannot work, refused by name."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import gradlift.jax as gl
import gradlift.numpy
from gradlift.errors import MisuseError, SettingsError, StateError
from gradlift.jax import finite_checking

WAYS = {"confirmed": finite_checking._confirmed, "side by side": finite_checking._side_by_side}
SMALLEST_NORMAL = 2.0**-126


def look(leaves, scale, way):
    """As `finite_checking.look` does, by one way or the other."""
    kinds, norm = jax.jit(WAYS[way])(leaves, jnp.float32(1 / scale))
    nonfinite = bool(kinds.any())
    return nonfinite, math.nan if nonfinite else float(norm), kinds.tolist()


def true_norm(leaves, scale):
    return math.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in leaves)) / scale


numbers = st.floats(width=32, allow_subnormal=False) | st.sampled_from(
    [1e30, -3e38, 1e-30, 2.0**-126, 0.0, -0.0, math.inf, -math.inf, math.nan]
)
PAIR = (np.zeros(3, np.float32), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100, deadline=None)
@given(
    data=st.tuples(
        arrays.arrays(np.float32, 3, elements=numbers),
        arrays.arrays(np.float32, (2, 2), elements=numbers),
    ),
    exponent=st.integers(-126, 126),
)
@example(data=(np.float32([1e38, 3e38, 3e38]), PAIR[1]), exponent=0)
@example(data=(np.float32([2.0**30, 0, 0]), PAIR[1]), exponent=-100)
@example(data=(np.float32([2.0**60, 0, 0]), PAIR[1]), exponent=60)
@example(data=(np.float32([1e-30, 0, 0]), PAIR[1]), exponent=126)
@example(data=(np.float32([3e38, 3e38, 3e38]), PAIR[1]), exponent=1)
@example(data=(np.float32([2.0**-120, 0, 0]), PAIR[1]), exponent=-100)
@example(data=(np.float32([np.nan, 0, 0]), PAIR[1]), exponent=16)
def test_the_look_is_numpys(way, data, exponent):
    scale = 2.0**exponent
    with np.errstate(all="ignore"):
        told = gradlift.numpy.inspect(dict(zip("ab", data, strict=True)), scale)
    nonfinite, norm, kinds = look([jnp.asarray(x) for x in data], scale, way)
    assert nonfinite == told.nonfinite
    for x, kind in zip(data, kinds, strict=True):
        with np.errstate(all="ignore"):
            used = np.concatenate([x.ravel(), x.ravel() * np.float32(1 / scale)])
        assert kind == (2 if np.isnan(x).any() else int(np.isinf(used).any()))
    if nonfinite:
        assert math.isnan(norm)
        return
    wanted = true_norm(data, scale)
    if wanted > 3.4e38:
        assert norm == math.inf  # every number is finite, their norm is not
    else:
        # XLA on the CPU takes numbers below float32's smallest normal one for zero.
        assert norm == pytest.approx(wanted, rel=1e-5, abs=4 * SMALLEST_NORMAL)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 1000), (505, 505)])
def test_no_bad_element_is_overlooked(dtype, shape):
    """XLA's maximum on the CPU loses NaN; the check does not rest on it."""
    rng = np.random.default_rng(0)
    check = jax.jit(lambda g: finite_checking.look([g, jnp.ones(3)], 1.0, amax=True))
    for bad in (np.nan, np.inf, -np.inf):
        for _ in range(5):
            g = rng.standard_normal(shape).astype(np.float32)
            g.ravel()[rng.integers(g.size)] = bad
            seen = check(jnp.asarray(g, dtype))
            assert bool(seen.nonfinite)
            assert float(seen.amax) == math.inf
    clean = jnp.asarray(rng.standard_normal(shape), dtype)
    seen = check(clean)
    assert not bool(seen.nonfinite)
    assert float(seen.amax) == max(1, float(jnp.abs(clean.astype(jnp.float32)).max()))


def test_float16_squares_are_summed_in_float32():
    seen = finite_checking.look([jnp.full(16, 30000.0, jnp.float16)], 0.5, amax=False)
    assert float(seen.norm) == pytest.approx(60000.0, rel=1e-6)


def test_amax_is_taken_only_for_rules_that_want_it():
    def text(rule):
        run = gl.value_and_grad(lambda w: w.sum())
        return str(jax.make_jaxpr(run)(gl.Scaler(rule), jnp.ones((3, 5))))

    assert "reduce_max" in text("auto")
    assert "reduce_max" not in text("dynamic")
    _, _, _, result = gl.value_and_grad(lambda w: w.sum())(gl.Scaler("dynamic"), jnp.ones(2))
    assert math.isnan(float(result.amax))


def test_what_is_used_is_checked():
    """A finite scaled gradient that 1/scale carries out of float32 is not finite."""
    scaler = gl.Scaler("dynamic:init_scale=2^-24")
    tx = gl.wrap(optax.sgd(1.0), scaler.rule)
    params = jnp.ones(2)
    _, state = jax.jit(tx.update)(jnp.array([1.0, 1e35]), tx.init(params), params, value=1.0)
    assert not bool(state.result.stepped)
    _, state = jax.jit(tx.update)(jnp.array([1.0, 1e30]), tx.init(params), params, value=1.0)
    assert bool(state.result.stepped)


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
        gl.scale_loss(jnp.ones(2), state)


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

"""What is used is what is checked: every element, every format, every layout."""

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

TWO = (np.zeros(3, np.float32), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100, deadline=None)
@given(
    data=st.tuples(
        arrays.arrays(np.float32, 3, elements=numbers),
        arrays.arrays(np.float32, (2, 2), elements=numbers),
    ),
    exponent=st.integers(-126, 126),
)
@example(data=(np.float32([1e38, 3e38, 3e38]), TWO[1]), exponent=0)
@example(data=(np.float32([2.0**30, 0, 0]), TWO[1]), exponent=-100)
@example(data=(np.float32([2.0**60, 0, 0]), TWO[1]), exponent=60)
@example(data=(np.float32([1e-30, 0, 0]), TWO[1]), exponent=126)
@example(data=(np.float32([3e38, 3e38, 3e38]), TWO[1]), exponent=1)
@example(data=(np.float32([2.0**-120, 0, 0]), TWO[1]), exponent=-100)
@example(data=(np.float32([np.nan, 0, 0]), TWO[1]), exponent=16)
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
    tx = gl.wrap(optax.sgd(1.0), "dynamic:init_scale=2^-24")
    params = jnp.ones(2)
    state = tx.init(params)
    for large, stepped in ((1e13, False), (1e7, True)):
        loss = gl.scaled(lambda p, x: (p * jnp.array([1.0, 1e30]) * x).sum(), state)
        grads = jax.grad(loss)(params, large)
        _, after = jax.jit(tx.update)(grads, state, params, value=1.0)
        assert bool(after.result.stepped) is stepped


def test_numbers_known_while_compiling_are_looked_at_as_others_are():
    """Their squares leave float32, so they are looked at twice, and nothing of it is folded."""
    large = jnp.array([-2e37, 2e37, 0.0], jnp.float32)
    seen = jax.jit(lambda: finite_checking.look([large], 1.0, amax=False))()
    assert not bool(seen.nonfinite)
    assert float(seen.norm) == pytest.approx(2e37 * math.sqrt(2), rel=1e-6)

"""What jmp's and flax's own tests ask, in our words, of the original and of gradlift's names.

One function here for each of theirs, in their order; the cases are theirs. jmp 0.0.4:
`loss_scale_test.py` (14 functions, 25 cases), `policy_test.py` (13, 72). flax: `dynamic_scale_test`
(2), which its installed release does not have yet.
"""

import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.training import dynamic_scale
from helpers.jax import bits

import gradlift.jax as gl
from gradlift.errors import MisuseError

both = pytest.mark.parametrize("lib", [jmp, gl], ids=["jmp", "gradlift"])
odd = pytest.mark.filterwarnings("ignore:.*is .*, not a power of two")
YES, NO = jnp.bool_(True), jnp.bool_(False)


# jmp's loss scales


@both
def test_no_scale_hands_back_the_same_object(lib):
    tree = {"a": jnp.float32(1)}
    assert lib.NoOpLossScale().scale(tree) is tree
    assert lib.NoOpLossScale().unscale(tree) is tree


@odd
@both
@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize(("name", "kind"), [("StaticLossScale", int), ("DynamicLossScale", float)])
def test_scale_multiplies_and_unscale_takes_back(lib, name, kind, factor):
    scale = getattr(lib, name)(kind(factor))
    assert scale.scale({"a": jnp.float32(1)}) == {"a": jnp.float32(factor)}
    assert scale.unscale({"a": jnp.float32(factor)}) == {"a": jnp.float32(1)}


@odd
@both
@pytest.mark.parametrize("name", ["NoOpLossScale", "StaticLossScale"])
def test_what_never_changes_has_no_leaves(lib, name):
    made = lib.NoOpLossScale() if name == "NoOpLossScale" else lib.StaticLossScale(0)
    assert jax.tree.leaves(made) == []


@both
def test_a_plain_float_warns_of_nothing(lib):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lib.DynamicLossScale(2.0**15)


@both
def test_a_dynamic_scale_has_two_leaves_and_survives_a_map(lib):
    value, counter = jnp.float32(1), jnp.int32(0)
    scale = lib.DynamicLossScale(value, counter, 2000, 2)
    assert jax.tree.leaves(scale) == [value, counter]
    assert jax.tree.map(lambda leaf: leaf, scale) == scale


PACES = pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])


@odd
@both
@PACES
def test_clean_steps_are_counted_and_the_last_of_a_period_multiplies(lib, period, factor):
    scale = lib.DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor)
    told = []
    for _ in range(period):
        scale = scale.adjust(YES)
        told.append((float(scale.loss_scale), int(scale.counter)))
        assert (scale.period, scale.factor) == (period, factor)
    assert told == [(10.0, i) for i in range(1, period)] + [(10.0 * factor, 0)]


@odd
@both
@PACES
def test_bad_steps_divide_down_to_one(lib, period, factor):
    divides(lib.DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor), 1.0)


@odd
@both
@pytest.mark.parametrize(
    ("period", "factor", "least"), [(20, 2, 0.3125), (30, 3, 0.37), (5.0, 2.0, 0.0)]
)
def test_bad_steps_divide_down_to_the_least(lib, period, factor, least):
    start = jnp.float32(10), jnp.int32(0), period, factor, jnp.asarray(least)
    divides(lib.DynamicLossScale(*start), least)


def divides(scale, least):
    kept = scale.period, scale.factor
    for i in range(1, 101):
        scale = scale.adjust(NO)
        expected = max(least, 10.0 / float(scale.factor) ** i)
        np.testing.assert_allclose(scale.loss_scale, expected, rtol=1e-5)
        assert int(scale.counter) == 0
        assert (scale.period, scale.factor) == kept


@both
def test_adjust_wants_one_boolean(lib):
    """jmp's test of this name has no body; its code asserts it."""
    with pytest.raises(AssertionError, match="boolean scalar"):
        lib.DynamicLossScale(jnp.float32(8)).adjust(jnp.ones(2, bool))


@both
@pytest.mark.parametrize("field", ["loss_scale", "min_loss_scale"])
def test_whole_numbers_warn(lib, field):
    with pytest.warns(UserWarning, match=f"floating type for {field}, got int32"):
        lib.DynamicLossScale(**{"loss_scale": jnp.float32(1), field: jnp.int32(1)})


@both
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_number_in_any_place_is_enough(lib, bad):
    good, bad = jnp.float32(1), jnp.float32(bad)
    for tree in (None, {}, {"a": good, "b": good}):
        assert lib.all_finite(tree)
    for tree in ({"a": bad}, {"a": good, "b": bad}, {"a": bad, "b": good}):
        assert not lib.all_finite(tree)


@both
def test_one_of_two_trees(lib):
    zero, one = jnp.float32(0), jnp.float32(1)
    first, second = {"a": one, "b": zero}, {"a": zero, "b": one}
    for pred, expected in ((YES, first), (NO, second)):
        assert lib.select_tree(pred, None, None) is None
        assert lib.select_tree(pred, first, second) == expected


@both
def test_more_than_one_boolean_selects_nothing(lib):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        lib.select_tree(jnp.ones(1), None, None)


# jmp's policies

DTYPES = (np.float16, jnp.float16, jnp.bfloat16, np.float32, jnp.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
arrays = pytest.mark.parametrize("numpy", [np, jnp], ids=["numpy", "jnp"])
NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "full"}


@both
@dtypes
@arrays
@pytest.mark.parametrize("part", ["param", "compute", "output"])
def test_a_policy_casts_to_each_of_its_types(lib, dtype, numpy, part):
    policy = lib.Policy(dtype, dtype, dtype)
    assert getattr(policy, f"{part}_dtype") == dtype
    cast = getattr(policy, f"cast_to_{part}")({"a": numpy.ones([])})
    assert cast["a"].dtype == dtype


@both
@dtypes
@arrays
def test_the_output_type_is_exchanged(lib, dtype, numpy):
    policy = lib.Policy(numpy.float32, numpy.float32, numpy.float32)
    assert policy.with_output_dtype(dtype).output_dtype == dtype


def parts(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


@both
@pytest.mark.parametrize("name", ["float16", "float32", "bfloat16"])
def test_one_name_is_all_three_types(lib, name):
    assert parts(lib.get_policy(name)) == (jnp.dtype(name),) * 3


@both
def test_a_name_that_is_nearly_a_type(lib):
    with pytest.raises(ValueError, match="Unknown dtype"):
        lib.get_policy("compute_float16")


@both
@dtypes
@arrays
def test_what_is_not_said_follows(lib, dtype, numpy):
    name = jnp.dtype(dtype).name
    assert parts(lib.get_policy(f"c={name}")) == (numpy.float32, dtype, dtype)


@both
@dtypes
@arrays
def test_what_is_said_counts(lib, dtype, numpy):
    name = jnp.dtype(dtype).name
    assert parts(lib.get_policy(f"c={name},o=full")) == (numpy.float32, dtype, numpy.float32)


@both
def test_half_is_float16_here(lib):
    assert jax.local_devices()[0].platform == "cpu"
    assert lib.half_dtype() == jnp.float16


@both
def test_casts_leave_alone_what_is_no_float(lib):
    thing, whole = object(), jnp.ones([], jnp.int16)
    half, full = jnp.ones([], jnp.float16), jnp.ones([])
    tree = {"o": thing, "h": half, "f": full, "i": whole}
    for cast, dtype in ((lib.cast_to_full, jnp.float32), (lib.cast_to_half, jnp.float16)):
        told = cast(tree)
        assert told["o"] is thing
        assert [told[k].dtype for k in "hfi"] == [dtype, dtype, jnp.int16]


@both
@dtypes
def test_a_policy_prints_short_names(lib, dtype):
    name = NAMES[jnp.dtype(dtype).name]
    assert str(lib.Policy(dtype, dtype, dtype)) == f"p={name},c={name},o={name}"


# flax's DynamicScale


def flaxs(cls, points, **settings):
    """The scales after a step at each point of a square."""
    scale, told = cls(scale=4.0, **settings), []
    for at in points:
        scale, finite, *_ = scale.value_and_grad(lambda p: p**2)(at)
        told.append((float(scale.scale), bool(finite)))
    return told


def test_it_grows_on_the_last_of_an_interval():
    """As flax's own test asks; its release 0.12.8 is one step late."""
    ours = flaxs(gl.DynamicScale, [1.0] * 6, growth_interval=3)
    assert ours == [(s, True) for s in (4.0, 4.0, 8.0, 8.0, 8.0, 16.0)]
    theirs = flaxs(dynamic_scale.DynamicScale, [1.0] * 6, growth_interval=2)
    late = flaxs(dynamic_scale.DynamicScale, [1.0] * 6, growth_interval=3)
    assert ours in (theirs, late)


def overflows(p):
    return (p.astype(jnp.float16) * jnp.float16(6e4)).astype(jnp.float32).sum()


def test_a_bad_step_backs_off_and_starts_the_count_again():
    """flax's test makes the loss itself inf. Here such a loss moves neither scale nor count, on
    purpose; an overflow of the gradients alone does."""
    points = [1.0, np.inf, 1.0, 1.0]
    ours = flaxs(gl.DynamicScale, points, growth_interval=2)
    assert [finite for _, finite in ours] == [True, False, True, True]
    assert [scale for scale, _ in ours] == [4.0, 4.0, 8.0, 8.0]

    def run(cls, interval):
        scale, told = cls(scale=2.0, growth_interval=interval), []
        for fun in (jnp.sum, overflows, jnp.sum, jnp.sum):
            scale, *_ = scale.value_and_grad(fun)(jnp.ones(1))
            told.append(float(scale.scale))
        return told

    assert run(gl.DynamicScale, 2) == [2.0, 1.0, 1.0, 2.0]
    assert run(dynamic_scale.DynamicScale, 2)[:3] == [2.0, 1.0, 1.0]  # as the test of it has them
    assert jax.tree.leaves(gl.DynamicScale()) == jax.tree.leaves(dynamic_scale.DynamicScale())


# Beside jmp's own tests: what its users' programs need


@both
@pytest.mark.parametrize("kind", [jnp.float16, jnp.float32, float])
@pytest.mark.parametrize("name", ["StaticLossScale", "DynamicLossScale"])
def test_types_are_those_of_a_product(lib, name, kind):
    scale = getattr(lib, name)(kind(2.0**10))
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        expected = jnp.result_type(dtype, kind) if kind is not float else dtype
        for call in (scale.scale, scale.unscale):
            assert call({"x": jnp.ones(2, dtype)})["x"].dtype == expected


def half_run(lib, start, steps=200):
    """A float16 train state in `lax.scan`, as dm-haiku's imagenet example holds its own."""
    xs = jax.random.normal(jax.random.key(0), (steps, 8), jnp.float16)
    xs = jnp.where(jnp.arange(steps)[:, None] % 11 == 7, xs * 300, xs)
    params = {"w": jnp.linspace(-1, 1, 8).astype(jnp.float16)}

    def step(carry, x):
        params, scale = carry
        loss = lambda p: jnp.square(p["w"] * x).astype(jnp.float32).mean().astype(jnp.float16)
        grads = scale.unscale(jax.grad(lambda p: scale.scale(loss(p)))(params))
        finite = lib.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - jnp.float16(0.01) * g, params, grads)
        scale = scale.adjust(finite)
        return (lib.select_tree(finite, new, params), scale), finite

    (params, scale), finite = jax.jit(lambda carry: jax.lax.scan(step, carry, xs))((params, start))
    return params, scale, finite


@pytest.mark.parametrize(
    "start",
    [
        lambda lib: lib.DynamicLossScale(2.0**11, period=20),
        lambda lib: lib.StaticLossScale(2.0**9),
        lambda lib: lib.StaticLossScale(np.float16(2**9)),
    ],
    ids=["dynamic", "static", "static, float16"],
)
def test_a_float16_train_state_in_a_scan_ends_where_jmps_does(start):
    (theirs, last, finite), (ours, scale, told) = [half_run(lib, start(lib)) for lib in (jmp, gl)]
    assert bits(ours) == bits(theirs)
    assert finite.tolist() == told.tolist()
    assert 0 < finite.sum() < 200
    assert bits(scale) == bits(last)
    assert [jax.typeof(x) for x in jax.tree.leaves(scale)] == [
        jax.typeof(x) for x in jax.tree.leaves(last)
    ]
    assert ours["w"].dtype == jnp.float16


def test_a_float16_dynamic_scale_goes_through_a_scan():
    """jmp's own forgets the type of `min_loss_scale` there, and raises."""
    params, scale, finite = half_run(gl, gl.DynamicLossScale(jnp.float16(2**11), period=20))
    assert scale.loss_scale.dtype == params["w"].dtype == jnp.float16
    assert 0 < finite.sum() < 200


@odd
@pytest.mark.parametrize("factor", [2, 3, 10])
def test_adjust_is_jmps_to_the_bit(factor):
    rng = np.random.default_rng(factor)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        how = {"period": 3, "factor": factor, "min_loss_scale": np.float32(0.25).astype(dtype)}
        ours, theirs = (lib.DynamicLossScale(dtype(1000), **how) for lib in (gl, jmp))
        for _ in range(120):
            finite = jnp.bool_(rng.random() < 0.85)
            ours, theirs = ours.adjust(finite), theirs.adjust(finite)
            assert bits(ours) == bits(theirs)
            assert [x.dtype for x in jax.tree.leaves(ours)] == [dtype, jnp.int32]


def test_a_saved_jmp_state_unflattens():
    theirs = jmp.DynamicLossScale(jnp.float32(64), jnp.int32(7))
    ours = gl.DynamicLossScale(jnp.float32(1))
    again = jax.tree.unflatten(jax.tree.structure(ours), jax.tree.leaves(theirs))
    assert (float(again.loss_scale), int(again.counter)) == (64.0, 7)
    assert not isinstance(ours, gl.StaticLossScale)  # as in jmp


def test_a_static_scale_of_an_array_goes_into_jit():
    for value in (8.0, jnp.float32(8), np.float16(8)):
        scale = gl.StaticLossScale(value)
        told = jax.jit(lambda scale, x: scale.scale(x))(scale, jnp.ones((), jnp.float16))
        assert told.dtype == scale.scale(jnp.ones((), jnp.float16)).dtype
        assert float(told) == 8.0


# What differs from jmp, on purpose


def test_the_least_scale_is_not_lost_in_jit():
    through = jax.jit(lambda scale: scale.adjust(NO))
    made = [lib.DynamicLossScale(jnp.float32(8), min_loss_scale=np.float32(8)) for lib in (gl, jmp)]
    assert [float(through(through(s)).loss_scale) for s in made] == [8.0, 2.0]
    with pytest.raises(MisuseError, match="min_loss_scale is traced"):
        jax.jit(lambda x: gl.DynamicLossScale(x, min_loss_scale=x).loss_scale)(1.0)


def test_the_scale_never_becomes_zero():
    scales = [lib.DynamicLossScale(jnp.float16(1), min_loss_scale=0.0) for lib in (gl, jmp)]
    for _ in range(40):
        scales = [scale.adjust(NO) for scale in scales]
    assert [float(s.loss_scale) for s in scales] == [2.0**-14, 0.0]

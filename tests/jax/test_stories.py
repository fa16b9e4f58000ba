"""gradlift.jax as stories: what goes wrong in real runs, and what must come of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradlift.jax as gl
import gradlift.numpy
from gradlift import Cause, rules
from gradlift.core import clip_coefficient
from gradlift.errors import MisuseError, SettingsError

OPT = optax.adamw(0.1)
X = jnp.linspace(-1.0, 1.0, 8)


def start(scale="dynamic:init_scale=16", seed=0):
    params = {"w": jax.random.normal(jax.random.key(seed), (8, 3)), "b": -jnp.zeros(3)}
    return params, OPT.init(params), gl.Scaler(scale)


def half_loss(params, x, times=1.0):
    """A loss through float16 activations, so that gradients overflow as they really do."""
    w = params["w"].astype(jnp.float16)
    out = (x.astype(jnp.float16)[None] @ w).astype(jnp.float32) + params["b"]
    return jnp.square(out).mean() * times


def step(params, state, scaler, x, times=1.0, optimizer=OPT, clip=None, **how):
    _, grads, scaler, result = gl.value_and_grad(half_loss, **how)(scaler, params, x, times)
    params, state = gl.apply(optimizer, grads, state, params, result, max_norm=clip)
    return params, state, scaler, result


jitted = jax.jit(step, static_argnames=("optimizer", "clip", "retries", "accumulate"))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


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


def test_a_clean_step_is_the_plain_optimizers():
    """A power of two comes and goes without a trace; so does the selection."""
    params, state, scaler = start("static:2^10")

    def loss(params, x):
        return jnp.square(x @ params["w"] + params["b"]).mean()

    @jax.jit
    def plain(params, state):
        grads = jax.grad(loss)(params, X)
        updates, state = OPT.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def lifted(params, state, scaler):
        _, grads, scaler, result = gl.value_and_grad(loss)(scaler, params, X)
        return gl.apply(OPT, grads, state, params, result), grads

    wanted, (got, grads) = plain(params, state), lifted(params, state, scaler)
    assert bits(grads) == bits(jax.jit(jax.grad(loss))(params, X))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)  # XLA may contract multiply-adds elsewhere


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
            updates, held = tx.update(4 * times * params, held, params)
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


def test_clipping_takes_the_true_norm():
    params, _, scaler = start("static:2^10")
    sgd = optax.sgd(1.0)
    one = jax.jit(functools.partial(step, optimizer=sgd, clip=0.25))
    after, _, _, result = one(params, sgd.init(params), scaler, X)
    grads = jax.grad(half_loss)(params, X)
    assert float(result.grad_norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-3)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, after, params))
    assert float(moved) == pytest.approx(0.25, rel=1e-4)


def test_clipping_measures_what_it_is_given():
    """Gradients changed by the user, a part of them, or those of `Off`: the norm is taken anew."""
    params, sgd = {"a": jnp.ones(4), "b": jnp.ones(9)}, optax.sgd(1.0)

    def moved(scaler, change):
        _, grads, _, result = gl.value_and_grad(lambda p: p["a"].sum() + p["b"].sum())(
            gl.Scaler(scaler), params
        )
        some, grads = change(params, grads)
        after, _ = gl.apply(sgd, grads, sgd.init(some), some, result, max_norm=1.0)
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, after, some)))

    for scaler in ("static:8", "off"):
        assert moved(scaler, lambda p, g: (p, g)) == pytest.approx(1, rel=1e-5)
        assert moved(scaler, lambda p, g: (p["a"], g["a"])) == pytest.approx(1, rel=1e-5)
        assert moved(scaler, lambda p, g: (p, jax.tree.map(lambda x: 2 * x, g))) == (
            pytest.approx(1, rel=1e-5)
        )
    with pytest.raises(SettingsError, match="max_norm is -1"):
        gl.apply(sgd, params, None, params, result_of(True), max_norm=-1)


def test_the_clip_coefficient_is_torchs_to_the_bit():
    """The core's for Python numbers is compared with torch's own where torch is tested."""
    rng = np.random.default_rng(0)
    norms = np.float32(2.0 ** rng.uniform(-4, 12, 5000))
    for most in (1.0, 0.3, 7.1):
        wanted = [clip_coefficient(float(n), most) for n in norms]
        got = jax.jit(jax.vmap(lambda n, most=most: clip_coefficient(n, most, jnp)))(norms)
        assert got.tolist() == wanted
    sgd, params = optax.sgd(1.0), jnp.zeros(1)
    for norm in norms[:5]:
        run = gl.value_and_grad(lambda p, norm=norm: (p * norm).sum())
        _, grads, _, result = run(gl.Scaler("static:8"), params)
        moved, _ = gl.apply(sgd, grads, sgd.init(params), params, result, max_norm=0.3)
        tx = gl.wrap(sgd, "static:1", max_norm=0.3)
        other, _ = tx.update(jnp.array([norm]), tx.init(params), params)
        wanted = -norm * np.float32(clip_coefficient(float(norm), 0.3))
        assert float(moved[0]) == float(other[0]) == float(wanted)


def result_of(stepped):
    held = gl.wrap(OPT).init(jnp.ones(1)).result
    return dataclasses.replace(held, cause=jnp.int32(Cause.NONE if stepped else Cause.OVERFLOW))


def test_off_touches_nothing():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    bad = jnp.array([1.0, jnp.nan], jnp.bfloat16)
    _, grads, _scaler, result = gl.value_and_grad(lambda p: (p["w"] * bad).sum())(
        gl.Scaler("off"), params
    )
    assert grads["w"].dtype == jnp.bfloat16  # nothing is cast
    assert bool(result.stepped)
    assert math.isnan(float(result.grad_norm))
    text = str(jax.make_jaxpr(gl.value_and_grad(lambda p: p.sum()))(gl.Scaler("off"), jnp.ones(2)))
    assert "is_finite" not in text
    tx = gl.wrap(optax.sgd(1.0), "off")
    updates, state = tx.update({"w": bad}, tx.init(params), params)
    assert float(updates["w"][0]) == -1
    assert bool(jnp.isnan(updates["w"][1]))
    assert bool(state.result.stepped)


def test_no_gradients_is_neither():
    scaler = gl.Scaler("dynamic:init_scale=16,growth_interval=1")
    for tree in ({}, {"a": None}, {"a": jnp.zeros((0, 3))}):
        _, _, after, result = jax.jit(gl.value_and_grad(lambda p: jnp.float32(1)))(scaler, tree)
        assert Cause(int(result.cause)) is Cause.NO_GRADIENTS
        assert bits(after.state) == bits(scaler.state)
        assert (int(after.steps), int(after.skipped_steps)) == (1, 0)


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
    batches[7][2] = np.nan  # the loss is dead: nothing to be gained by trying again
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


def test_some_bad_losses_are_blamed_only_where_the_gradients_show_it():
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


# Types


def test_a_float16_loss_carries_two_to_the_15_at_most():
    def loss(w):
        return (w.astype(jnp.float16) * jnp.float16(2**-4)).sum()

    _, grads, scaler, result = jax.jit(gl.value_and_grad(loss))(gl.Scaler("dynamic"), jnp.ones(2))
    assert grads.tolist() == [2**-4, 2**-4]
    assert float(result.scale) == 2.0**15 == float(scaler.state.scale)
    with pytest.raises(MisuseError, match="compute the loss in float32"):
        gl.value_and_grad(loss)(gl.Scaler("static:2^16"), jnp.ones(2))
    tx = gl.wrap(OPT, "dynamic")
    with pytest.raises(MisuseError, match="max_scale=2\\^15"):
        gl.scale_loss(jnp.float16(1), tx.init(jnp.ones(2)))
    fits = gl.wrap(OPT, "dynamic:init_scale=2^15,max_scale=2^15").init(jnp.ones(2))
    assert float(gl.scale_loss(jnp.float16(2), fits)) == 2.0**16


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
        grads = jax.grad(lambda p: gl.scale_loss(loss(p), held))(params)
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


# Mixing routes, tracing, carrying


def test_the_routes_do_not_mix():
    params = jnp.ones(2)
    tx = gl.wrap(optax.sgd(0.1), "static:8")
    state = tx.init(params)

    @jax.jit
    def mixed(params, state):
        _, grads, _, _ = gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), params)
        return tx.update(grads, state, params)

    with pytest.raises(MisuseError, match="have lost their scale already"):
        mixed(params, state)
    _, grads, _, _ = gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), params)
    with pytest.raises(MisuseError, match="have lost their scale already"):
        tx.update({"nested": grads}, state, params)
    tx.update(jnp.array(grads), state, params)  # another array is another matter
    with pytest.raises(MisuseError, match="holds 0 scalers"):
        gl.scale_loss(jnp.float32(1), OPT.init(params))


def test_marks_leave_nothing_behind():
    from gradlift.jax.application import _marks

    held = len(_marks)
    for _ in range(3):
        gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), jnp.ones(2))
        jax.jit(gl.value_and_grad(lambda p: p.sum()))(gl.Scaler("static:8"), jnp.ones(2))
    import gc

    gc.collect()
    assert len(_marks) <= held + 1


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
        loss, grads = jax.value_and_grad(lambda p: gl.scale_loss(half_loss(p, x), state))(params)
        updates, state = tx.update(grads, state, params, value=loss / state.scaler.state.scale)
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
    updates, _ = tx.update(jnp.full(2, 8.0), state, jnp.ones(2), value=1.0, temperature=3)
    assert updates.tolist() == [-1.0, -1.0]
    assert set(seen) == {(1.0, 3)}
    _, grads, _, result = gl.value_and_grad(lambda p: p.sum())(gl.Scaler("static:8"), jnp.ones(2))
    after, _ = gl.apply(inner, grads, (), jnp.ones(2), result, value=2.0, temperature=4)
    assert after.tolist() == [2.0, 2.0]
    assert (2.0, 4) in seen


def test_without_the_loss_nobody_is_blamed():
    tx = gl.wrap(OPT, "dynamic:init_scale=16")
    params = jnp.ones(2)
    bad = jnp.array([1.0, jnp.nan])
    _, state = tx.update(bad, tx.init(params), params)
    assert Cause(int(state.result.cause)) is Cause.UNKNOWN_NONFINITE
    assert float(state.scaler.state.scale) == 8.0
    _, state = tx.update(bad, tx.init(params), params, value=jnp.nan)
    assert Cause(int(state.result.cause)) is Cause.LOSS_NONFINITE
    assert float(state.scaler.state.scale) == 16.0

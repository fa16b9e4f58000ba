"""Unusual trees, gradients and transformations: the step is right, or refused before it writes."""

import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jax import bits
from jax import lax

import gradlift.jax as gl
from gradlift.errors import MisuseError

INF, NAN = math.inf, math.nan
SGD = optax.sgd(1.0)


def total(params, times=1.0):
    """A loss whose gradient is `times` everywhere, through float16."""
    leaves = [x for x in jax.tree.leaves(params) if jnp.size(x)]
    halves = [jnp.asarray(x).astype(jnp.float16) for x in leaves]
    return sum(jnp.sum(x).astype(jnp.float32) for x in halves) * times


def step(carry, times=1.0, optimizer=SGD, loss=total):
    params, state, scaler = carry
    _, grads, scaler, result = gl.value_and_grad(loss)(scaler, params, times)
    params, state = gl.apply(optimizer, grads, state, params, result)
    return (params, state, scaler), result


def start(params, rule="dynamic:init_scale=8", optimizer=SGD):
    return params, optimizer.init(params), gl.Scaler(rule)


def wrapped_step(tx, params, state, times=1.0):
    grads = jax.grad(gl.scaled(total, state))(params, times)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Trees


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        jnp.ones(2, jnp.float16),
        jnp.ones(2, jnp.bfloat16),
        jnp.ones((0, 3)),
        jnp.float32(1.0),
        None,
        1.0,
        np.ones(2, np.float32),
        np.broadcast_to(np.float32(1), (2, 2)),
        np.asfortranarray(np.ones((2, 3), np.float32)),
    ],
    ids=lambda x: f"{type(x).__name__}{getattr(x, 'dtype', '')}{getattr(x, 'shape', '')}",
)
def test_leaves_of_every_make_beside_a_float32_one(other, jit):
    carry = start({"a": jnp.ones(3), "b": other}, optimizer=SGD)
    go = jax.jit(step) if jit else step
    for times, stepped in ((INF, False), (1.0, True)):
        before = carry
        carry, result = go(carry, times)
        assert bool(result.stepped) is stepped
        if not stepped:
            assert bits(carry[:2]) == bits(jax.tree.map(jnp.asarray, before[:2]))
    assert all(not jnp.any(x) for x in jax.tree.leaves(carry[0]))


def test_float0_and_integer_gradients():
    """jax.grad(allow_int=True) gives float0 for integers: they carry nothing and are left alone."""
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    held = gl.Scaler("static:8")
    tx = gl.wrap(optax.sgd(1.0), "static:8")
    state = tx.init(params)
    grads = jax.grad(gl.scaled(lambda p: p["w"].sum(), state), allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    updates, state = tx.update({"w": grads["w"], "n": None}, state, {"w": params["w"], "n": None})
    assert updates["w"].tolist() == [-1.0, -1.0]
    with pytest.raises(MisuseError, match=r"at \['n'\] is int32, which has no gradient"):
        gl.value_and_grad(lambda p: p["w"].sum())(held, params)
    with pytest.raises(MisuseError, match=r"at \['n'\] is int32, expected real floating-point"):
        tx.update({"w": grads["w"], "n": jnp.arange(2)}, state, params)


def test_the_same_array_under_two_names():
    shared = jnp.ones(2)
    (params, _, _), result = step(start({"a": shared, "b": shared}))
    assert result.stepped
    assert [x.tolist() for x in params.values()] == [[0.0, 0.0], [0.0, 0.0]]


# Gradients changed after the look


EDITS = {
    "an element": lambda g: g.at[0].set(NAN),
    "divided by a norm of zero": lambda g: g / (g - g).sum(),
    "cast to float16": lambda g: (g * 1e6).astype(jnp.float16),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("edit", EDITS)
def test_a_gradient_that_was_spoiled_after_the_look_is_not_applied(edit, max_norm, jit):
    optimizer = optax.adam(0.1)

    def go(params, state, scaler, spoil):
        _, grads, scaler, result = gl.value_and_grad(total)(scaler, params)
        grads = {**grads, "a": EDITS[edit](grads["a"])} if spoil else grads
        return gl.apply(optimizer, grads, state, params, result, max_norm=max_norm)

    go = jax.jit(go, static_argnums=3) if jit else go
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    before = go(params, optimizer.init(params), gl.Scaler("static:8"), False)
    if jit:
        after = go(*before[::1], gl.Scaler("static:8"), True)
    else:
        with pytest.warns(UserWarning, match="gradient of a was changed after it had been checked"):
            after = go(*before, gl.Scaler("static:8"), True)
    assert bits(after) == bits(before)


def test_gradients_of_two_jits_and_edited_soundly_are_applied():
    params = {"a": jnp.ones(3)}
    made = jax.jit(gl.value_and_grad(total))(gl.Scaler("static:8"), params)
    params, _ = jax.jit(lambda g, p, r: gl.apply(SGD, g, SGD.init(p), p, r))(
        jax.tree.map(lambda g: g / 2, made[1]), params, made[3]
    )
    assert params["a"].tolist() == [0.5] * 3


def test_off_applies_what_it_is_given():
    params = {"a": jnp.ones(2)}
    _, grads, _, result = gl.value_and_grad(total)(gl.Scaler("off"), params)
    params, _ = gl.apply(SGD, {"a": grads["a"] * INF}, SGD.init(params), params, result)
    assert params["a"].tolist() == [-INF, -INF]


# Transformations around a step


TIMES = jnp.array([1.0, INF, 1.0, NAN, 1.0])


def by_hand():
    carry = start({"a": jnp.full(3, 8.0)})
    for times in TIMES:
        carry, _ = step(carry, times)
    return carry


@pytest.mark.parametrize("around", ["cond", "switch", "while", "fori", "scan", "remat"])
def test_control_flow_around_a_step(around):
    def once(i, carry):
        if around == "cond":
            return lax.cond(TIMES[i] != 7.0, lambda c: step(c, TIMES[i])[0], lambda c: c, carry)
        if around == "switch":
            return lax.switch(1, [lambda c: c, lambda c: step(c, TIMES[i])[0]], carry)
        if around == "remat":
            return step(carry, TIMES[i], loss=jax.checkpoint(total))[0]
        return step(carry, TIMES[i])[0]

    def whole(carry):
        if around == "while":
            return lax.while_loop(
                lambda held: held[0] < len(TIMES),
                lambda held: (held[0] + 1, once(held[0], held[1])),
                (0, carry),
            )[1]
        if around == "scan":
            return lax.scan(lambda c, i: (once(i, c), None), carry, jnp.arange(len(TIMES)))[0]
        return lax.fori_loop(0, len(TIMES), once, carry)

    found, expected = jax.jit(whole)(start({"a": jnp.full(3, 8.0)})), by_hand()
    assert bits(found) == bits(expected)
    assert (int(found[2].steps), int(found[2].skipped_steps)) == (5, 2)


def test_a_branch_that_is_not_taken_steps_nothing():
    carry = start({"a": jnp.full(3, 8.0)})
    after = jax.jit(lambda c, go: lax.cond(go, lambda c: step(c)[0], lambda c: c, c))(carry, False)
    assert bits(after) == bits(carry)


@pytest.mark.parametrize("route", ["apply", "wrap"])
def test_steps_of_several_models_side_by_side_by_vmap(route):
    """Each has its own scale, and one's overflow is none of another's."""
    tx = gl.wrap(SGD, "dynamic:init_scale=8")
    params = {"a": jnp.arange(12.0).reshape(4, 3)}
    times = jnp.array([1.0, INF, 2.0, NAN])

    def one(params, times):
        if route == "apply":
            (params, _, scaler), result = step(start(params), times)
            return params, scaler.state.scale, result.stepped
        params, state = wrapped_step(tx, params, tx.init(params), times)
        return params, state.scaler.state.scale, state.result.stepped

    found = jax.jit(jax.vmap(one))(params, times)
    for i in range(4):
        alone = one({"a": params["a"][i]}, times[i])
        assert bits(jax.tree.map(lambda x, i=i: x[i], found)) == bits(alone)
    assert found[2].tolist() == [True, False, True, False]


@pytest.mark.parametrize("route", ["apply", "wrap"])
def test_donated_buffers_are_used_once_and_kept_by_a_skip(route):
    tx = gl.wrap(optax.adam(0.5), "dynamic:init_scale=8")
    params = {"a": jnp.full(3, 8.0)}
    if route == "apply":
        go = jax.jit(lambda c, t: step(c, t, optax.adam(0.5))[0], donate_argnums=0)
        carry = start(params, optimizer=optax.adam(0.5))
    else:
        go = jax.jit(lambda c, t: wrapped_step(tx, *c, t), donate_argnums=0)
        carry = params, tx.init(params)
    carry = go(jax.tree.map(jnp.copy, carry), 1.0)
    kept = bits(carry[0])
    held = carry
    carry = go(carry, INF)
    assert held[0]["a"].is_deleted()
    assert bits(carry[0]) == kept
    carry = go(carry, 1.0)
    assert bits(carry[0]) != kept
    assert np.isfinite(np.asarray(carry[0]["a"])).all()


def test_one_scaler_and_state_through_jit_twice():
    """Nothing is consumed: the same state gives the same step again."""
    carry, go = start({"a": jnp.full(3, 8.0)}), jax.jit(lambda c: step(c)[0])
    assert bits(go(carry)) == bits(go(carry))
    assert bits(go(go(carry))) == bits(go(go(carry)))


# optax around a wrapped optimizer


def test_a_frozen_part_by_a_mask_inside_and_by_labels_outside():
    params = {"a": jnp.ones(2), "frozen": jnp.ones(2)}
    labels = {"a": "train", "frozen": "freeze"}
    inner = optax.multi_transform({"train": SGD, "freeze": optax.set_to_zero()}, labels)
    outer = optax.multi_transform(
        {"train": gl.wrap(SGD, "static:8"), "freeze": optax.set_to_zero()}, labels
    )
    for tx in (gl.wrap(inner, "static:8"), outer):
        state = tx.init(params)
        after, state = wrapped_step(tx, params, state, INF)
        assert bits(after) == bits(params)
        after, state = wrapped_step(tx, after, state)
        assert after["a"].tolist() == [0.0, 0.0]
        assert after["frozen"].tolist() == [1.0, 1.0]


def test_micro_batches_by_multi_steps():
    """The mean of a window that overflowed stays NaN in optax's own state (it is multiplied by 0):
    nothing is written from then on. `value_and_grad(accumulate=True)` has no such state."""
    tx = optax.MultiSteps(gl.wrap(SGD, "dynamic:init_scale=8"), every_k_schedule=2)
    params = {"a": jnp.full(2, 8.0)}
    state, seen = tx.init(params), []
    for times in (1.0, 1.0, INF, 1.0, 1.0, 3.0):
        params, state = wrapped_step(tx, params, state, times)
        seen.append(params["a"][0].item())
    assert seen == [8.0, 7.0, 7.0, 7.0, 7.0, 7.0]
    assert int(state.inner_opt_state.scaler.skipped_steps) == 2


# Calls


def test_parameters_frozen_and_added_in_mid_run():
    params, state, scaler = start({"a": jnp.ones(2)})
    (params, state, scaler), _ = step((params, state, scaler))
    params = {**params, "b": jnp.ones(2)}
    (params, state, scaler), result = step((params, SGD.init(params), scaler), INF)
    assert list(result.culprits) == ["b", "a"]
    (params, state, scaler), _ = step((params, state, scaler))
    assert [x.tolist() for x in params.values()] == [[-1.0, -1.0], [0.0, 0.0]]
    frozen = params.pop("b")
    (params, state, scaler), _ = step((params, SGD.init(params), scaler))
    assert int(scaler.steps) == 4
    assert frozen.tolist() == [0.0, 0.0]


def test_a_state_loaded_between_the_gradients_and_their_step():
    """Gradients of `value_and_grad` have lost their scale: another one changes nothing."""
    params, state, scaler = start({"a": jnp.ones(2)})
    _, grads, after, result = gl.value_and_grad(total)(scaler, params)
    loaded = after.load_state_dict(gl.Scaler("dynamic:init_scale=2").state_dict())
    params, _ = gl.apply(SGD, grads, state, params, result)
    assert params["a"].tolist() == [0.0, 0.0]
    assert loaded.get_scale() == 2.0


def test_an_optimizer_that_raises_leaves_everything_to_be_used_again():
    def bad(grads, state, params=None):
        raise MemoryError("no room")

    carry = start({"a": jnp.ones(2)})
    _, grads, _, result = gl.value_and_grad(total)(carry[2], carry[0])
    with pytest.raises(MemoryError):
        gl.apply(optax.GradientTransformation(lambda p: (), bad), grads, (), carry[0], result)
    params, _ = gl.apply(SGD, grads, carry[1], carry[0], result)
    assert params["a"].tolist() == [0.0, 0.0]


def test_threads_side_by_side():
    expected, found, go = bits(by_hand()), {}, jax.jit(lambda c, t: step(c, t)[0])

    def train(i):
        carry = start({"a": jnp.full(3, 8.0)})
        for times in TIMES:
            carry = (go if i % 2 else lambda c, t: step(c, t)[0])(carry, times)
        found[i] = bits(carry)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)

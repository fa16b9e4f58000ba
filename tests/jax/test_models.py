"""Model libraries, checkpoints, and the other adapter's scaler."""

import json
import os
import pickle
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import gradlift.jax as gl
import gradlift.numpy
from gradlift import Cause, rules

OPT = optax.adamw(1e-2)
X = jax.random.normal(jax.random.key(0), (32, 4))
Y = X[:, :1] * 2 - X[:, 1:2]
DEAD, HUGE = jnp.nan, 1e30


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def train(step, carry):
    """Thirty good steps, an overflow, a dead loss: it learns, and the bad ones change nothing."""
    losses = []
    for _ in range(30):
        *carry, loss, result = step(*carry, 1.0)
        losses.append(float(loss))
        assert bool(result.stepped)
    assert losses[-1] < losses[0] / 2
    before = bits(carry[:-1])
    for times, cause in ((HUGE, Cause.OVERFLOW), (DEAD, Cause.LOSS_NONFINITE)):
        *carry, loss, result = step(*carry, times)
        assert Cause(int(result.cause)) is cause
        assert bits(carry[:-1]) == before


def squared(out, times):
    return jnp.square(out.astype(jnp.float32) - Y).mean() * times


def test_plain_dicts():
    keys = jax.random.split(jax.random.key(1))
    params = {
        "in": {"w": jax.random.normal(keys[0], (4, 16)) / 2, "b": jnp.zeros(16)},
        "out": {"w": jax.random.normal(keys[1], (16, 1)) / 4},
    }
    policy = gl.Policy("params=float32,compute=float16,output=float32")

    def loss_fn(params, x, times):
        p, x = policy.cast_to_compute((params, x))
        out = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]["w"]
        return squared(policy.cast_to_output(out), times)

    @jax.jit
    def step(params, state, scaler, times):
        run = gl.value_and_grad(loss_fn, retries=3)
        loss, grads, scaler, result = run(scaler, params, X, times)
        params, state = gl.apply(OPT, grads, state, params, result, max_norm=1.0)
        return params, state, scaler, loss, result

    train(step, (params, OPT.init(params), gl.Scaler("auto", retries=True)))


def test_equinox():
    """None where a leaf is no array, as `partition` leaves it."""
    model = eqx.nn.MLP(4, 1, 16, 1, activation=jnp.tanh, key=jax.random.key(2))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert any(x is None for x in jax.tree.leaves(params, is_leaf=lambda x: x is None))

    def loss_fn(params, x, times):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        return squared(jax.vmap(eqx.combine(half, static))(x.astype(jnp.float16)), times)

    @jax.jit
    def step(params, state, scaler, times):
        loss, grads, scaler, result = gl.value_and_grad(loss_fn, retries=3)(
            scaler, params, X, times
        )
        params, state = gl.apply(OPT, grads, state, params, result)
        return params, state, scaler, loss, result

    train(step, (params, OPT.init(params), gl.Scaler("auto", retries=True)))
    _, grads, _, _ = gl.value_and_grad(loss_fn)(gl.Scaler("static:8"), params, X, DEAD)
    assert all(name.startswith("layers.") for name in gl.culprits(grads))
    assert len(gl.culprits(grads)) == 4


def test_equinox_modules_with_filtered_jit():
    model = eqx.nn.Linear(4, 1, key=jax.random.key(2))
    tx = gl.wrap(OPT, "dynamic:init_scale=16")

    @eqx.filter_jit
    def step(model, state, times):
        def scaled(model):
            loss = squared(jax.vmap(model)(X).astype(jnp.float16), times)
            return gl.scale_loss(loss, state), loss

        (_, loss), grads = eqx.filter_value_and_grad(scaled, has_aux=True)(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array), value=loss)
        return eqx.apply_updates(model, updates), state, loss

    state = tx.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(20):
        model, state, loss = step(model, state, 1.0)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    before = bits(eqx.filter(model, eqx.is_array))
    model, state, _ = step(model, state, HUGE)
    assert bits(eqx.filter(model, eqx.is_array)) == before
    assert float(state.scaler.state.scale) == 8.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 16, dtype=jnp.float16, rngs=rngs)
        self.outer = nnx.Linear(16, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


def test_flax_nnx():
    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss_fn(params, x, times):
        return squared(nnx.merge(graph, params)(x), times)

    @jax.jit
    def step(params, state, scaler, times):
        loss, grads, scaler, result = gl.value_and_grad(loss_fn, retries=3)(
            scaler, params, X, times
        )
        params, state = gl.apply(OPT, grads, state, params, result)
        return params, state, scaler, loss, result

    train(step, (params, OPT.init(params), gl.Scaler("auto", retries=True)))


def test_flax_nnx_optimizer_carries_the_scaler():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, gl.wrap(OPT, "auto", max_norm=1.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def scaled(model):
            loss = squared(model(X), 1.0)
            return gl.scale_loss(loss, optimizer.opt_state), loss

        (_, loss), grads = nnx.value_and_grad(scaled, has_aux=True)(model)
        optimizer.update(model, grads, value=loss)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


# Checkpoints


def used(rule="auto"):
    scaler = gl.Scaler(rule)
    run = jax.jit(
        gl.value_and_grad(lambda w, x: (w.astype(jnp.float16) * x).astype(jnp.float32).sum())
    )
    for x in (1.0, 1e-3, 6e4, 0.1, 1e-2):
        _, _, scaler, _ = run(scaler, jnp.ones(3), jnp.float16(x))
    return scaler


RULES = [
    "auto",
    "auto:cautious",
    "dynamic:growth_interval=2",
    "megatron",
    "static:8",
    "off",
]


@pytest.mark.parametrize("rule", RULES)
def test_pickle_json_and_copies_keep_every_field(rule):
    scaler = used(rule)
    for again in (
        pickle.loads(pickle.dumps(scaler)),
        gl.Scaler(rule).load_state_dict(json.loads(json.dumps(scaler.state_dict()))),
        jax.jit(lambda s: s)(scaler),
        jax.tree.map(lambda x: x, scaler),
    ):
        assert again.rule == scaler.rule
        assert bits(again) == bits(scaler)
        assert [x.dtype for x in again.state] == [x.dtype for x in scaler.state]
        assert not any(x.weak_type for x in again.state)
    if rule not in ("static:8", "off"):
        assert bits(scaler) != bits(gl.Scaler(rule))


def test_orbax(tmp_path):
    params = {"w": jnp.ones(3)}
    tx = gl.wrap(OPT, "auto")
    _, state = tx.update({"w": jnp.full(3, 8.0)}, tx.init(params), params, value=1.0)
    tree = {"scaler": used(), "wrapped": state, "params": params}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
        checkpointer.wait_until_finished()
        fresh = {"scaler": gl.Scaler("auto"), "wrapped": tx.init(params), "params": params}
        again = checkpointer.restore(tmp_path / "run", fresh)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert isinstance(again["scaler"], gl.Scaler)
    assert bits(again) == bits(tree)
    tx.update({"w": jnp.ones(3)}, again["wrapped"], params)


@pytest.mark.parametrize("rule", [*RULES, "auto:sharp"])
def test_the_numpy_adapter_goes_on_where_this_one_stopped_and_back(rule):
    scaler = used(rule)
    there = gradlift.numpy.Scaler(rule)
    there.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert there.rule == scaler.rule  # "auto" has not become sharp on the way
    assert there.rule.dump(there.state) == scaler.rule.dump(jax.device_get(scaler.state))
    back = gl.Scaler(rule).load_state_dict(there.state_dict())
    assert bits(back) == bits(scaler)


def test_a_sharp_state_stays_sharp_elsewhere():
    sharp = gl.Scaler("auto", retries=True)
    assert sharp.rule == rules.parse("auto:sharp")
    there = gradlift.numpy.Scaler("auto")
    assert there.rule == gl.Scaler("auto").rule == rules.parse("auto:cautious")
    there.load_state_dict(sharp.state_dict())
    assert there.rule == sharp.rule


TORCH = """
import json, sys
import torch
from gradlift.torch import GradScaler

told = []
for rule, state in json.load(sys.stdin):
    scaler = GradScaler("cpu", rule=rule)
    scaler.load_state_dict(state)
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    seen = scaler.get_scale()
    for times in (1.0, 1e30, 1.0):
        optimizer.zero_grad()
        scaler.scale((w.half() * 2.0**-3).float().sum() * times).backward()
        scaler.step(optimizer)
        scaler.update()
    told.append([seen, scaler.state_dict()])
own = torch.amp.GradScaler("cpu", init_scale=512.0)
json.dump([told, own.state_dict()], sys.stdout)
assert "jax" not in sys.modules
"""


def test_the_torch_adapter_goes_on_where_this_one_stopped_and_back():
    """In a process of its own: two frameworks must not meet in one."""
    scalers = [used(rule) for rule in RULES[:6]]
    sent = json.dumps([[str(s.rule), s.state_dict()] for s in scalers])
    done = subprocess.run(
        [sys.executable, "-c", TORCH],
        input=sent,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told, plain = json.loads(done.stdout)
    for scaler, (seen, state) in zip(scalers, told, strict=True):
        assert seen == float(scaler.state.scale)
        back = scaler.load_state_dict(state)
        assert float(back.state.scale) == state["scale"]
        assert back.state_dict()["gradlift"]["level"] == state["gradlift"]["level"]
        # and this adapter, on the same three steps, comes to the same state
        here = scaler
        run = jax.jit(
            gl.value_and_grad(
                lambda w, t: (w.astype(jnp.float16) * 2.0**-3).astype(jnp.float32).sum() * t
            )
        )
        for times in (1.0, 1e30, 1.0):
            _, _, here, _ = run(here, jnp.ones(3), jnp.float32(times))
        assert bits(here.state) == bits(back.state), str(scaler.rule)
    own = gl.Scaler("dynamic").load_state_dict(plain)  # torch's own scaler
    assert float(own.state.scale) == 512.0
    assert "torch" not in sys.modules

"""What a hostile reader tried."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import gradlift.jax as gl
from gradlift.errors import MisuseError, StateError


def hidden(w, x):
    """Activation gradients 17 bits above those of the weights: they overflow unseen."""
    return ((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32) * 0.5).sum()


@pytest.mark.parametrize("retries", range(7))
def test_a_sound_batch_is_never_lost_by_trying_a_higher_scale(retries):
    run = jax.jit(gl.value_and_grad(hidden, retries=retries))
    *_, result = run(gl.Scaler("auto:sharp"), jnp.ones(4), jnp.full(4, 6e-6))
    assert bool(result.stepped)
    assert int(result.retries) <= retries


def test_what_follows_masters_in_a_chain_counts():
    optimizer = optax.chain(gl.master(optax.sgd(1.0)), optax.keep_params_nonnegative())
    params = jnp.array([0.5, 2.0], jnp.float16)
    loss_fn = lambda p: p.astype(jnp.float32).sum()
    _, grads, _, result = gl.value_and_grad(loss_fn)(gl.Scaler("static:8"), params)
    moved, _ = gl.apply(optimizer, grads, optimizer.init(params), params, result)
    assert moved.tolist() == [0.0, 1.0]


def test_a_fresh_state_can_be_donated():
    tx, params = gl.wrap(optax.adam(0.1), "dynamic"), {"w": jnp.ones(2)}

    def body(carry, x):
        params, state = carry
        updates, state = tx.update({"w": x * jnp.ones(2)}, state, params)
        return (optax.apply_updates(params, updates), state), None

    scanned = jax.jit(lambda c, x: jax.lax.scan(body, c, x)[0], donate_argnums=0)
    params, state = scanned((params, tx.init(params)), jnp.ones(3))
    assert bool(state.result.stepped)


def test_masters_of_float32_leaves_can_be_donated_with_them():
    optimizer = gl.master(optax.adam(0.1))
    params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(3)}
    state = optimizer.init(params)

    def step(params, state, scaler):
        loss_fn = lambda p: p["w"].astype(jnp.float32).sum() + p["norm"].sum()
        _, grads, scaler, result = gl.value_and_grad(loss_fn)(scaler, params)
        return (*gl.apply(optimizer, grads, state, params, result), scaler)

    params, state, _ = jax.jit(step, donate_argnums=(0, 1))(params, state, gl.Scaler("static:8"))
    assert (params["norm"] < 1).all()


def test_a_rule_keeps_its_factors_and_a_static_scale_is_not_replaced():
    saved = gl.Scaler("dynamic:growth_interval=7,init_scale=8").state_dict()
    loaded = gl.Scaler("dynamic").load_state_dict(saved)
    assert loaded.rule == gl.Scaler("dynamic").rule
    assert float(loaded.state.scale) == 8.0
    with pytest.raises(StateError, match="outside"):
        gl.Scaler("static:8").load_state_dict(gl.Scaler("static:1024").state_dict())


def test_a_float16_loss_tells_the_scale_that_comes_next():
    scaler = gl.Scaler("dynamic:growth_interval=1")
    loss_fn = lambda p: (p.astype(jnp.float16) * jnp.float16(0.01)).sum()
    for _ in range(3):
        *_, scaler, result = gl.value_and_grad(loss_fn)(scaler, jnp.ones(2))
        assert float(result.scale) == float(result.next_scale) == float(scaler.state.scale) == 2**15


def test_an_optimizer_that_knows_no_value_is_not_given_one():
    def update(grads, state, params=None, *, mine=1.0):
        return jax.tree.map(lambda g: -g, grads), state

    plain = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, params = gl.wrap(plain, "static:8"), jnp.ones(2)
    updates, _ = tx.update(8 * jnp.ones(2), tx.init(params), params, value=1.0)
    assert updates.tolist() == [-1.0, -1.0]


DEVICES = """
import jax, jax.numpy as jnp, numpy as np, tempfile, os
from jax.sharding import Mesh, PartitionSpec as P
import gradlift.jax as gl
from gradlift import Journal, read_journal
from gradlift.errors import MisuseError

mesh = Mesh(np.array(jax.devices()), ("d",))
journal = Journal(os.path.join(tempfile.mkdtemp(), "run.jsonl"))

def step(params, scaler, x):
    f = gl.value_and_grad(lambda p, x: (p * x).sum(), axis_name="d")
    loss, grads, scaler, result = f(scaler, params, x)
    gl.log_inside(journal, result, 0)
    return grads

def run(split):
    specs = (P("d") if split else P(), P(), P("d"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(mapped)(jnp.ones(4), gl.Scaler("dynamic"), jnp.ones((4, 4) if not split else 4))

run(False)
jax.effects_barrier()
assert len(read_journal(journal.path).steps) == 1
try:
    run(True)
except MisuseError as error:
    assert "split along" in str(error)
    print("told")
"""


def test_on_four_devices_a_step_is_written_once_and_split_parameters_are_refused():
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert done.stdout == "told\n", done.stderr


def test_apply_refuses_what_is_no_gradient_by_name():
    params = {"w": jnp.ones(2)}
    *_, result = gl.value_and_grad(lambda p: p["w"].sum())(gl.Scaler("static:8"), params)
    optimizer = optax.sgd(0.1)
    with pytest.raises(MisuseError, match=r"\['w'\] is int32"):
        gl.apply(optimizer, {"w": jnp.arange(2)}, optimizer.init(params), params, result)

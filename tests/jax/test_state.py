"""Saved, loaded, gone on: the same rule, the same bits; damage is refused."""

import json
import os
import pickle
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import dynamic_scale
from helpers.jax import ADAMW, bits

import gradlift.jax as gl
import gradlift.numpy
from gradlift import rules
from gradlift.errors import StateError


def test_a_rule_keeps_its_factors_and_a_static_scale_is_not_replaced():
    saved = gl.Scaler("dynamic:growth_interval=7,init_scale=8").state_dict()
    loaded = gl.Scaler("dynamic").load_state_dict(saved)
    assert loaded.rule == gl.Scaler("dynamic").rule
    assert float(loaded.state.scale) == 8.0
    with pytest.raises(StateError, match="outside"):
        gl.Scaler("static:8").load_state_dict(gl.Scaler("static:1024").state_dict())


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
    tx = gl.wrap(ADAMW, "auto")
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


def flax_bytes(tree, fresh, path):
    return serialization.from_bytes(fresh, serialization.to_bytes(tree))


def pickled(tree, fresh, path):
    return pickle.loads(pickle.dumps(tree))


def by_equinox(tree, fresh, path):
    eqx.tree_serialise_leaves(path / "run.eqx", tree)
    return eqx.tree_deserialise_leaves(path / "run.eqx", fresh)


def by_orbax(tree, fresh, path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "run", tree)
        return checkpointer.restore(
            path / "run", item=fresh, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(), fresh)
        )


def everything():
    """Each object that holds a scale, after a few steps."""
    params = {"w": jnp.ones(3)}
    tx = gl.wrap(ADAMW, "auto")
    state = tx.init(params)
    for size in (1.0, 6e4, jnp.inf, 1e-3):
        _, state = tx.update({"w": jnp.full(3, size)}, state, params, value=1.0)
    peers = gl.DynamicScale(scale=8.0), gl.DynamicLossScale(jnp.float16(8), period=3)
    used_peers = (
        jax.jit(lambda ds: ds.value_and_grad(jnp.sum)(jnp.ones(2)))(peers[0]).dynamic_scale,
        peers[1].adjust(jnp.array(True)),
    )
    return {"a": used(), "b": state, "c": used_peers[0]}, used_peers[1]


@pytest.mark.parametrize("way", [flax_bytes, pickled, by_equinox, by_orbax])
def test_every_way_to_save_gives_back_every_bit(way, tmp_path):
    """flax' msgpack takes no jmp scale: nor does it take jmp's own."""
    tree, jmps = everything()
    if way is not flax_bytes:
        tree["d"] = jmps
    fresh = jax.tree.map(jnp.zeros_like, tree)
    if way is flax_bytes:
        fresh["a"] = gl.Scaler("auto")
        fresh["b"] = fresh["b"]._replace(scaler=gl.Scaler("auto"))
    again = way(tree, fresh, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert bits(again) == bits(tree)
    assert [x.dtype for x in jax.tree.leaves(again)] == [x.dtype for x in jax.tree.leaves(tree)]
    assert bits(again) != bits(fresh)


def test_flax_refuses_what_was_saved_by_another_rule_or_of_other_parameters():
    saved = serialization.to_bytes(gl.Scaler("dynamic"))
    with pytest.raises(StateError, match="saved with the rule 'backoff'"):
        serialization.from_bytes(gl.Scaler("auto"), saved)
    tx = gl.wrap(optax.sgd(0.1), "dynamic")
    saved = serialization.to_bytes(tx.init({"a": jnp.ones(2), "b": jnp.ones(2)}))
    with pytest.raises(StateError, match=r"'kinds' of the saved Result has shape \[2\]"):
        serialization.from_bytes(tx.init({"a": jnp.ones(2)}), saved)
    peers = serialization.to_bytes(dynamic_scale.DynamicScale(scale=8.0, fin_steps=3))
    ours = serialization.from_bytes(gl.DynamicScale(), peers)
    assert (ours.scale, ours.fin_steps) == (8.0, 3)
    back = serialization.from_bytes(dynamic_scale.DynamicScale(), serialization.to_bytes(ours))
    assert (back.scale, back.fin_steps) == (8.0, 3)


LATER = """
import gradlift.jax as gl
import sys
scaler = gl.Scaler("dynamic:init_scale=8")
assert "flax" not in sys.modules
from flax import serialization
saved = serialization.to_bytes(gl.Scaler("dynamic:init_scale=8"))
print(serialization.from_bytes(scaler, saved).get_scale())
"""


def test_flax_may_be_imported_later():
    done = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["8.0"]


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

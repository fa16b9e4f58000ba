"""Eight devices, run as a process of its own: one bad shard skips all, and all keep one scale."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradlift.jax as gl
from gradlift import Cause

N = 8
OPT = optax.adam(0.1)
MESH = Mesh(np.array(jax.devices()), ("d",))
GOOD = jnp.arange(1.0, N + 1)[:, None] * jnp.ones((N, 4)) / 16
BAD = GOOD.at[5, 2].set(6e4)  # overflows in float16 on device 5 alone
BAD_LOSS = GOOD.at[3, 0].set(jnp.nan)


def loss_fn(params, x):
    """Through float16, so that gradients overflow as they really do."""
    return (params["w"].astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum()


def start(rule="dynamic:init_scale=16"):
    params = {"w": jnp.ones(4)}
    return params, OPT.init(params), gl.Scaler(rule)


def route_a(params, state, scaler, x, **how):
    loss, grads, scaler, result = gl.value_and_grad(loss_fn, axis_name="d", **how)(
        scaler, params, x[0]
    )
    params, state = gl.apply(OPT, grads, state, params, result, max_norm=1.0)
    return params, state, scaler, result, loss


def mapped(**how):
    """With and without JAX keeping track of what differs between devices, and under pmap."""
    shard = functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(P(), P(), P(), P("d")), out_specs=P()
    )
    step = functools.partial(route_a, **how)
    yield "tracked", jax.jit(shard(step))
    yield "untracked", jax.jit(shard(step, check_vma=False))
    every = jax.pmap(lambda p, s, c, x: step(p, s, c, x[None]), "d", in_axes=(None, None, None, 0))

    def pmapped(*args):
        out = every(*args)
        for leaf in jax.tree.leaves(out):  # all devices ended with the same bits
            assert len({device.tobytes() for device in np.asarray(leaf)}) == 1
        return jax.tree.map(lambda x: x[0], out)

    yield "pmap", pmapped


def alone(params, state, scaler, x, **how):
    """The same on one device: the average loss of all shards."""

    def whole(params, x):
        return jnp.stack([loss_fn(params, x[i]) for i in range(N)]).mean()

    loss, grads, scaler, result = gl.value_and_grad(whole, **how)(scaler, params, x)
    params, state = gl.apply(OPT, grads, state, params, result, max_norm=1.0)
    return params, state, scaler, result, loss


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(map(np.asarray, a), map(np.asarray, b)))


def one_bad_shard_skips_all():
    for name, step in mapped():
        params, state, scaler = start()
        before = jax.tree.leaves((params, state))
        after = step(params, state, scaler, BAD)
        assert same(jax.tree.leaves(after[:2]), before), name
        assert int(after[3].cause) == Cause.OVERFLOW, name
        assert [c.described for c in after[3].culprits] == ["w (inf)"], name
        assert float(after[2].state.scale) == 8, name
        after = step(params, state, scaler, BAD_LOSS)
        assert int(after[3].cause) == Cause.LOSS_NONFINITE, name
        assert float(after[2].state.scale) == 16, name
        after = step(params, state, scaler, GOOD)
        assert bool(after[3].stepped), name
        wanted = alone(params, state, scaler, GOOD)
        assert float(after[4]) == float(wanted[4]), name
        np.testing.assert_allclose(after[0]["w"], wanted[0]["w"], rtol=1e-6)
        np.testing.assert_allclose(after[3].grad_norm, wanted[3].grad_norm, rtol=1e-6)


def gradients_are_averaged():
    for name, step in mapped():
        params, state, scaler = start("static:16")
        told = step(params, state, scaler, GOOD)
        np.testing.assert_allclose(told[3].grad_norm, 2 * 4.5 / 16, rtol=1e-6, err_msg=name)


def a_loss_that_is_averaged_already():
    """The way JAX recommends: `pmean` inside the loss."""

    def step(params, scaler, x):
        def mean(params, x):
            return lax.pmean(loss_fn(params, x), "d")

        _, grads, _, result = gl.value_and_grad(mean, axis_name="d")(scaler, params, x[0])
        return grads, result

    for tracked in (True, False):
        run = jax.shard_map(
            step, mesh=MESH, in_specs=(P(), P(), P("d")), out_specs=P(), check_vma=tracked
        )
        params, _, scaler = start("static:16")
        grads, _ = jax.jit(run)(params, scaler, GOOD)
        np.testing.assert_allclose(grads["w"], np.full(4, 4.5 / 16), rtol=1e-6)


def all_retry_together():
    for name, step in mapped(retries=8):
        params, state, scaler = start("dynamic:init_scale=2^20")
        after = step(params, state, scaler, GOOD.at[2].set(1.0))
        assert bool(after[3].stepped), name
        assert float(after[3].scale) == 2.0**20 / 2 ** int(after[3].retries), name
        # Tracked, JAX adds the devices' gradients up in float16, where they meet the batch.
        assert float(after[3].scale) == (2.0**14 if name == "tracked" else 2.0**15), name


def micro_batches():
    for name, step in mapped(accumulate=True):
        params, state, scaler = start()
        batch = jnp.stack([GOOD, 3 * GOOD], 1)  # two micro-batches a device
        after = step(params, state, scaler, batch)
        np.testing.assert_allclose(after[3].grad_norm, 4 * 4.5 / 16, rtol=1e-6, err_msg=name)
        after = step(params, state, scaler, jnp.stack([GOOD, BAD], 1))
        assert int(after[3].cause) == Cause.OVERFLOW, name


def amax_is_taken_before_the_average():
    for name, step in mapped():
        if name == "tracked":
            continue  # there JAX has added the gradients up before anybody could look
        params, state, scaler = start("headroom:init_scale=16")
        told = step(params, state, scaler, GOOD)
        assert float(told[3].amax) == 8.0, (name, told[3].amax)


def route_b():
    tx = gl.wrap(optax.adam(0.1), "dynamic:init_scale=16", axis_name="d")

    def step(params, state, x):
        def average(p):
            return lax.pmean(loss_fn(p, x[0]), "d")

        loss, grads = jax.value_and_grad(gl.scaled(average, state))(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for tracked in (True, False):
        run = jax.jit(
            jax.shard_map(
                step, mesh=MESH, in_specs=(P(), P(), P("d")), out_specs=P(), check_vma=tracked
            )
        )
        params = {"w": jnp.ones(4)}
        state = tx.init(params)
        after, moved = run(params, state, BAD)
        assert same([after["w"]], [params["w"]])
        assert int(moved.result.cause) == Cause.OVERFLOW
        after, moved = run(params, state, GOOD)
        assert bool(moved.result.stepped)
        assert abs(float(moved.result.grad_norm) - 2 * 4.5 / 16) < 1e-6


def sharded_arrays_need_nothing():
    """Plain jit: parameters and batch split over the devices."""

    @jax.jit
    def step(params, state, scaler, x):
        _, grads, scaler, result = gl.value_and_grad(
            lambda p, x: (
                (p["w"].astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum()
            )
        )(scaler, params, x)
        params, state = gl.apply(OPT, grads, state, params, result, max_norm=1.0)
        return params, state, scaler, result

    split = NamedSharding(MESH, P("d"))
    params = {"w": jax.device_put(jnp.ones(64), split)}
    state, scaler = OPT.init(params), gl.Scaler("dynamic:init_scale=16")
    x = jax.device_put(jnp.arange(64.0) / 64, split)
    moved, _, _, result = step(params, state, scaler, x)
    assert bool(result.stepped)
    assert moved["w"].sharding.is_equivalent_to(split, 1)
    kept, _, after, result = step(params, state, scaler, x.at[41].set(6e4))
    assert not bool(result.stepped)
    assert float(after.state.scale) == 8
    assert same([kept["w"]], [params["w"]])


if __name__ == "__main__":
    assert len(jax.devices()) == N, jax.devices()
    stories = [
        one_bad_shard_skips_all,
        gradients_are_averaged,
        a_loss_that_is_averaged_already,
        all_retry_together,
        micro_batches,
        amax_is_taken_before_the_average,
        route_b,
        sharded_arrays_need_nothing,
    ]
    for story in stories:
        story()
        print(json.dumps(story.__name__), flush=True)
    sys.exit(0)

"""One of two processes, each with one device: process_job.py INDEX PORT -> lines of JSON."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradlift.jax as gl
from gradlift import Cause

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
MESH = Mesh(np.array(jax.devices()), ("d",))
SPREAD, SAME = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
OPT = optax.adam(0.1)


def loss_fn(params, x):
    """Through float16, so that gradients overflow as they really do."""
    return (params["w"].astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum()


def step(params, state, scaler, x, axis_name=None):
    _, grads, scaler, result = gl.value_and_grad(loss_fn, axis_name=axis_name)(scaler, params, x)
    params, state = gl.apply(OPT, grads, state, params, result, max_norm=1.0)
    return params, state, scaler, result


def whole(params, state, scaler, x):
    """The program as if there were one device: jit spreads it over both processes."""
    return step(params, state, scaler, x.mean(0))


sharded = jax.shard_map(
    lambda p, s, c, x: step(p, s, c, x[0], "d"),
    mesh=MESH,
    in_specs=(P(), P(), P(), P("d")),
    out_specs=P(),
)


def batch(step):
    """Each process makes its own row; at step 2 the second one's overflows, at step 4 it is NaN."""
    row = np.full((1, 4), 0.25, np.float32)
    if jax.process_index() == 1 and step in (2, 4):
        row[0, 1] = 6e4 if step == 2 else np.nan
    return jax.make_array_from_process_local_data(SPREAD, row)


for name, program in {"jit": whole, "shard_map": sharded}.items():
    compiled = jax.jit(program)
    params = {"w": jnp.ones(4)}
    held = params, OPT.init(params), gl.Scaler("dynamic:init_scale=16,growth_interval=100")
    held = jax.tree.map(functools.partial(jax.device_put, device=SAME), held)
    rows = []
    for i in range(6):
        *held, result = compiled(*held, batch(i))
        told = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), result)
        weights = np.asarray(held[0]["w"].addressable_data(0)).tolist()
        cause = Cause(int(told.cause)).name
        rows.append([bool(told.stepped), cause, float(told.next_scale), weights])
    print(json.dumps([name, rows]), flush=True)

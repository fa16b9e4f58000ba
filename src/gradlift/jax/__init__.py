"""JAX: loss scaling as pure functions, inside `jit`, `scan` and `shard_map`, with optax.

    Route A: the scaler goes in and out              Route B: the optimizer carries it
    scaler = Scaler("dynamic")                       tx = wrap(optax.adamw(1e-3), "auto")
    loss, grads, scaler, result = (                  loss, grads = jax.value_and_grad(
        value_and_grad(f)(scaler, params, batch))        scaled(f, opt_state))(params, batch)
    params, opt_state = apply(                       updates, opt_state = tx.update(
        optimizer, grads, opt_state, params,             grads, opt_state, params, value=loss)
        result)

>>> import jax, jax.numpy as jnp, optax
>>> import gradlift.jax as gl
>>> params, optimizer = {"w": jnp.ones(3)}, optax.adam(0.1)
>>> opt_state, scaler = optimizer.init(params), gl.Scaler("auto", retries=True)
>>> def loss_fn(params, x):
...     return (params["w"].astype(jnp.float16) * x).astype(jnp.float32).sum()
>>> @jax.jit
... def step(params, opt_state, scaler, x):
...     loss, grads, scaler, result = gl.value_and_grad(loss_fn, retries=5)(scaler, params, x)
...     params, opt_state = gl.apply(optimizer, grads, opt_state, params, result, max_norm=1.0)
...     return params, opt_state, scaler, result
>>> params, opt_state, scaler, result = step(params, opt_state, scaler, jnp.ones(3, jnp.float16))
>>> bool(result.stepped)
True
"""

from .application import apply
from .differentiate import value_and_grad
from .finite_checking import culprits
from .flax_names import DynamicScale
from .jmp_names import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)
from .journaling import enforce, log, log_inside
from .masters import MasterState, master
from .optimizer_wrapper import WrapState, scaled, wrap
from .policy import Policy, cast_to_full, cast_to_half, get_policy, half_dtype
from .scaler import Result, Scaler

__all__ = [
    "Scaler",
    "Result",
    "value_and_grad",
    "apply",
    "wrap",
    "WrapState",
    "scaled",
    "master",
    "MasterState",
    "Policy",
    "get_policy",
    "half_dtype",
    "cast_to_half",
    "cast_to_full",
    "culprits",
    "log",
    "log_inside",
    "enforce",
    "all_finite",
    "select_tree",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "DynamicLossScale",
    "DynamicScale",
]

"""What the tests of gradlift.jax share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradlift.jax as gl
from gradlift import Cause

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


def result_of(stepped):
    held = gl.wrap(OPT).init(jnp.ones(1)).result
    return dataclasses.replace(held, cause=jnp.int32(Cause.NONE if stepped else Cause.OVERFLOW))


ADAMW = optax.adamw(1e-2)

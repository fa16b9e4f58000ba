"""JAX: checkpoints by Orbax, and by flax' msgpack."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization

import gradlift.jax as gl

from .jax_cache import compile_once
from .lives import BAD

compile_once()


class Orbax:
    """AdamW in one compiled step; the tree that is saved holds the scaler."""

    lag = 0

    def __init__(self, journal):
        self.journal = journal
        self.optimizer = optax.adamw(1e-2)
        w = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
        params = {"w": jnp.asarray(w), "v": jnp.asarray(np.full((32, 1), 0.125, np.float32))}
        scaler = gl.Scaler("dynamic:init_scale=2^10,growth_interval=3")
        self.tree = {"params": params, "opt": self.optimizer.init(params), "scaler": scaler}
        self.train = jax.jit(self.compiled)

    def compiled(self, tree, x, times):
        def loss(params):
            hidden = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
            out = (hidden @ params["v"].astype(jnp.float16)).astype(jnp.float32)
            return jnp.square(out).mean() * times

        _, grads, scaler, result = gl.value_and_grad(loss)(tree["scaler"], tree["params"])
        params, opt = gl.apply(
            self.optimizer, grads, tree["opt"], tree["params"], result, max_norm=1.0
        )
        return {"params": params, "opt": opt, "scaler": scaler}, result

    def step(self, n, mark):
        mark("compiled step")
        x = np.random.default_rng(n).standard_normal((64, 8)).astype(np.float32)
        times = np.float32(1e30 if n == BAD[0] else math.nan if n == BAD[1] else 1.0)
        self.tree, result = self.train(self.tree, x, times)
        jax.block_until_ready(self.tree)
        mark("log")
        gl.log(self.journal, result, n)

    def save(self, folder):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute() / "tree", self.tree)
            checkpointer.wait_until_finished()

    def load(self, folder):
        with ocp.StandardCheckpointer() as checkpointer:
            self.tree = checkpointer.restore(folder.absolute() / "tree", self.tree)

    def state(self):
        return map(jax.device_get, jax.tree.leaves(self.tree))


class Msgpack(Orbax):
    """The same as one file of bytes; of the scaler its `state_dict`, which is plain data."""

    def save(self, folder):
        held = {**self.tree, "scaler": self.tree["scaler"].state_dict()}
        (folder / "tree.msgpack").write_bytes(serialization.to_bytes(held))

    def load(self, folder):
        scaler = self.tree["scaler"]
        like = {**self.tree, "scaler": scaler.state_dict()}
        held = serialization.from_bytes(like, (folder / "tree.msgpack").read_bytes())
        self.tree = {**held, "scaler": scaler.load_state_dict(held["scaler"])}


RUNS = {"jax, Orbax": Orbax, "jax, msgpack": Msgpack}

"""JAX's own ways: values in, values out, inside `jit`, on several devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("these are JAX's", allow_module_level=True)

import jax
import jax.numpy as jnp
from helpers import PYTHONPATH
from helpers.keras import bits, lifted, line

from gradlift import Cause
from gradlift.errors import MisuseError
from gradlift.keras import LossScaleOptimizer, ScaleLogger

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
FOLDER = Path(__file__).parent


def half(w, x):
    """The product passes through float16, as in a mixed model."""
    return (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).sum()


class Loop:
    """A training loop as Keras' guide for JAX writes it."""

    def __init__(self, rule="dynamic:init_scale=2^8,growth_interval=3", **how):
        self.w = keras.Variable(np.zeros(2, np.float32), name="w")
        self.optimizer = LossScaleOptimizer(SGD(1.0), rule=rule)
        self.optimizer.build([self.w])
        self.one = jax.jit(self.one, **how)

    def one(self, weights, held, x):
        scope = keras.StatelessScope(state_mapping=list(zip(self.optimizer.variables, held)))
        with scope:
            grads = jax.grad(lambda w: self.optimizer.scale_loss(half(w[0], x)))(weights)
        return self.optimizer.stateless_apply(held, grads, weights)

    def step(self, *x):
        held = self.optimizer.variables
        values = [self.w.value], [v.value for v in held]
        moved, kept = self.one(*values, jnp.float32(x))
        for variable, value in zip([self.w, *held], [*moved, *kept], strict=True):
            variable.assign(value)
        return self.optimizer.result


def test_a_loop_of_values():
    loop = Loop(donate_argnums=(0, 1))
    told = [loop.step(x, 1) for x in (0.5, 4096, 0.5, 0.25, 0.25)]
    unknown = Cause.UNKNOWN_NONFINITE  # the loss is gone when the step comes
    assert [r.cause for r in told] == [0, unknown, 0, 0, 0]
    assert [r.scale for r in told] == [256, 256, 128, 128, 128]
    assert loop.w.numpy().tolist() == [-1.5, -4]
    assert float(loop.optimizer.loss_scale) == 256


def test_unscaling_by_hand_in_a_trace_is_refused():
    """JAX would keep no note of it, and the step would divide once more, or not at all."""
    w = keras.Variable(np.zeros(1, np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8)
    optimizer.build([w])
    with pytest.raises(MisuseError, match="inside jit, let the inner optimizer clip"):
        jax.jit(lambda g: optimizer.get_unscaled_gradients([g]))(jnp.ones(1))
    optimizer.scale_loss(jnp.float32(1))
    optimizer.apply([jnp.float32([8])], [w])
    assert w.numpy().tolist() == [-1]


def test_a_loss_noted_outside_is_not_baked_into_a_trace():
    w = keras.Variable(np.zeros(1, np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8)
    optimizer.build([w])
    optimizer.scale_loss(jnp.float32(np.nan))
    variables = [w, *optimizer.variables]

    @jax.jit
    def step(values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values))) as scope:
            optimizer.apply([jnp.float32([8])], [w])
        return [scope.get_current_value(v) for v in variables]

    values = [v.value for v in variables]
    for _ in range(3):
        values = step(values)
    assert values[0].tolist() == [-3]


def test_a_variable_without_elements():
    optimizer = LossScaleOptimizer(SGD(1.0), rule="auto:init_scale=8")
    empty, w = keras.Variable(np.zeros(0, np.float32)), keras.Variable(np.zeros(1, np.float32))
    optimizer.build([empty, w])
    optimizer.scale_loss(jnp.float32(1))
    optimizer.apply([jnp.zeros(0), jnp.float32([8])], [empty, w])
    assert w.numpy().tolist() == [-1]


def test_nothing_calls_back():
    """No host is asked during a step, and it is traced once."""
    optimizer = lifted(Adam(0.1, gradient_accumulation_steps=2), rule="auto", drop="window")
    model = line(optimizer)
    optimizer.build(model.trainable_variables)
    values = (
        [v.value for v in optimizer.variables],
        [jnp.ones((1, 1))],
        [v.value for v in model.trainable_variables],
    )
    optimizer.scale_loss(jnp.float32(1))
    text = str(jax.make_jaxpr(optimizer.stateless_apply)(*values))
    assert "is_finite" in text
    assert "callback" not in text
    peeping = jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(1.0)
    assert "callback" in str(peeping)  # so it would be found


def test_a_refused_step_gives_back_the_same_bits():
    w = keras.Variable(np.float32([-0.0, 1e-42, 3]))
    optimizer = LossScaleOptimizer(Adam(0.5), rule="static:8")
    optimizer.build([w])
    optimizer.scale_loss(jnp.float32(1))
    for run in (optimizer.stateless_apply, jax.jit(optimizer.stateless_apply)):
        held = [v.value for v in optimizer.variables]
        moved, kept = run(held, [jnp.float32([1, jnp.nan, 1])], [w.value])
        assert np.asarray(moved[0]).tobytes() == np.asarray(w.value).tobytes()
        inner = len(optimizer.inner_optimizer.variables)
        assert [np.asarray(v).tobytes() for v in kept[-inner:]] == bits(
            optimizer.variables[-inner:]
        )


def test_two_devices_decide_alike(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "data_parallel_job.py")],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": PYTHONPATH},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told == ["one_decision_for_both", "the_same_as_on_one_device"]


def test_the_logger_lets_fit_run_ahead(monkeypatch):
    """Keras' own `callback.model` would put all variables back, at every batch."""
    from keras.src.backend.jax.trainer import JAXTrainer

    own, syncs = JAXTrainer.jax_state_sync, []

    def counted(model):
        if getattr(model, "_jax_state", None) and not model._jax_state_synced:
            syncs.append(model)
        return own(model)

    monkeypatch.setattr(JAXTrainer, "jax_state_sync", counted)
    model = line(lifted(SGD(1.0)))
    x = np.full((100, 1), 0.5, np.float32)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[ScaleLogger()])
    assert len(syncs) == 1  # at the end of the epoch

"""Rules through keras.ops, and beside Keras' own LossScaleOptimizer, on the backend of this run."""

import os
import random

import keras
import numpy as np
import pytest
from conformance import exact

from gradlift import Reading, rules


def test_the_backend_is_the_one_asked_for():
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


@pytest.mark.parametrize("rule", exact.EVERY)
def test_rules_give_the_same_bits(rule, monkeypatch):
    monkeypatch.setattr(exact, "STEPS", 100)
    exact.check(rule, keras.ops, lambda x, kind: keras.ops.convert_to_tensor(x, kind))


def keras_own(peer, weight):
    """One step of Keras' optimizer -> its scale; on JAX, Keras only works without side effects."""
    if keras.backend.backend() != "jax":
        apply = lambda gradient: peer.apply([gradient], [weight])
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            apply = tf.function(apply)

        def step(gradient):
            apply(gradient)
            return float(peer.dynamic_scale)

        return step
    import jax

    where = next(i for i, v in enumerate(peer.variables) if v is peer.dynamic_scale)
    variables = [v.value for v in peer.variables]
    apply = jax.jit(lambda variables, g: peer.stateless_apply(variables, [g], [weight.value])[1])

    def step(gradient):
        variables[:] = apply(list(variables), gradient)
        return float(variables[where])

    return step


@pytest.mark.parametrize("seed", range(3))
def test_keras_preset_is_keras_class(seed):
    rule = rules.preset("keras", growth_interval=3)
    weight = keras.Variable(np.zeros(1, np.float32))
    peer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**15, dynamic_growth_steps=3
    )
    peer.build([weight])
    original = keras_own(peer, weight)
    state, rng = rule.init(), random.Random(seed)
    for step in range(3000):
        overflow = exact.overflows(rng, state.scale)
        gradient = keras.ops.convert_to_tensor(np.float32([np.inf if overflow else 1.0]))
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        assert state.scale == original(gradient), f"step {step}"

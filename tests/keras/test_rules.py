"""Rules through keras.ops, and beside Keras' own LossScaleOptimizer, on the backend of this run."""

import os
import random

import keras
import numpy as np
import pytest
from conformance import exact
from helpers.keras import (
    HUGE,
    OVERFLOW,
    SGD,
    fit,
    lifted,
    line,
    weights,
)

from gradlift import Cause, Reading, rules
from gradlift.keras import LossScaleOptimizer


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


# Rules, bounds, limits
def test_rules_by_text_number_or_value():
    inner = [SGD(0.1) for _ in range(6)]
    assert LossScaleOptimizer(inner[0]).rule == rules.preset("keras")
    assert LossScaleOptimizer(inner[1], rule="auto").rule == rules.parse("auto:cautious")
    assert LossScaleOptimizer(inner[2], rule=8).rule == rules.Static(8)
    mine = rules.Backoff(init_scale=4)
    assert LossScaleOptimizer(inner[3], rule=mine).rule is mine
    kept = LossScaleOptimizer(inner[4], initial_scale=8.0, dynamic=False)
    assert (kept.rule, kept.dynamic) == (rules.Static(8), False)
    short = LossScaleOptimizer(inner[5], 4.0, 7, "mine")
    assert (short.initial_scale, short.dynamic_growth_steps, short.name) == (4.0, 7, "mine")
    assert short.dynamic


def test_bounds_hold():
    rule = "dynamic:init_scale=8,min_scale=4,max_scale=16,growth_interval=1"
    optimizer = lifted(SGD(2.0**-10), rule=rule)
    model = line(optimizer)
    fit(model, 1, 1, 1)
    assert float(optimizer.dynamic_scale.value) == 16
    fit(model, *[8 * HUGE] * 4)
    assert float(optimizer.dynamic_scale.value) == 4
    assert (optimizer.counts[OVERFLOW], optimizer.counts[Cause.FLOOR]) == (2, 2)
    assert weights(model) == [-3 * 2.0**-10]

"""Beside Keras' own LossScaleOptimizer, driven by the same gradients: the same bits."""

import functools
import random

import keras
import numpy as np
import pytest
from conformance import exact
from helpers.keras import BACKEND, HUGE, LOSS_SEEN, NAN, bits, fit, line, weights
from keras import ops

from gradlift import Reading
from gradlift.keras import LossScaleOptimizer

SGD = keras.optimizers.SGD
FIT = [{"jit_compile": True}, {"jit_compile": False}]
if BACKEND != "jax":  # there Keras' class cannot run eagerly
    FIT.append({"run_eagerly": True})
if BACKEND != "torch":  # Keras refuses it there
    FIT.append({"steps_per_execution": 3})


class Driven:
    """An optimizer and two weights; `run` takes many steps, compiled where the backend compiles."""

    def __init__(self, kind, **settings):
        self.weights = [keras.Variable(np.ones(3, np.float32)), keras.Variable(np.float32(2))]
        # Halves and powers of two: no product is rounded, so no contraction can tell.
        self.optimizer = kind(SGD(0.5, momentum=0.5), **settings)
        self.optimizer.build(self.weights)
        self.optimizer.scale_loss(ops.convert_to_tensor(np.float32(1)))
        self.run = getattr(self, f"on_{BACKEND}")()

    def on_torch(self):
        def run(a, b):
            return np.array([self.one(*map(ops.convert_to_tensor, g)).item() for g in zip(a, b)])

        return run

    def on_tensorflow(self):
        import tensorflow as tf

        @tf.function
        def run(a, b):
            return tf.map_fn(lambda g: self.one(*g), (a, b), fn_output_signature=tf.float32)

        return run

    def one(self, a, b):
        scale = self.optimizer.dynamic_scale
        self.optimizer.apply([a * scale.value, b * scale.value], self.weights)
        return ops.copy(scale.value)

    def on_jax(self):
        """Values in, values out: Keras' own knows no other way there."""
        import jax

        held = self.optimizer.variables
        where = next(i for i, v in enumerate(held) if v is self.optimizer.dynamic_scale)

        def one(values, true):
            weights, kept = values
            grads = [g * kept[where] for g in true]
            weights, kept = self.optimizer.stateless_apply(kept, grads, weights)
            return (weights, kept), kept[where]

        scan = jax.jit(lambda values, a, b: jax.lax.scan(one, values, (a, b)))

        def run(a, b):
            values = [w.value for w in self.weights], [v.value for v in held]
            (moved, kept), scales = scan(values, a, b)
            for variable, value in zip([*self.weights, *held], [*moved, *kept], strict=True):
                variable.assign(value)
            return scales

        return run

    @property
    def variables(self):
        held = self.optimizer
        return [*self.weights, held.step_counter, *held.inner_optimizer.variables]


def side_by_side(steps, overflows, **settings):
    """Every step the same scale, every hundred steps the same weights, momenta and counters."""
    kinds = LossScaleOptimizer, keras.optimizers.LossScaleOptimizer
    ours, keras_own = (Driven(kind, **settings) for kind in kinds)
    rng, seen = np.random.default_rng(0), []
    a, b = rng.standard_normal((steps, 3), np.float32), rng.standard_normal(steps, np.float32)
    rule = ours.optimizer.rule
    state = rule.init()
    for n in range(steps):  # only to know where the scale will be: luck is steered by it
        if overflow := overflows(n, state.scale):
            a[n, n % 3] = rng.choice([np.nan, np.inf, -np.inf])
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
    for n in range(0, steps, 100):
        told = [
            ops.convert_to_numpy(d.run(a[n : n + 100], b[n : n + 100])) for d in (ours, keras_own)
        ]
        assert told[0].tolist() == told[1].tolist(), f"steps from {n}"
        assert bits(ours.variables) == bits(keras_own.variables), f"steps from {n}"
        seen += told[0].tolist()
    return seen


@pytest.mark.parametrize("growth", [1, 3])
def test_the_same_scales_and_weights(growth):
    luck = random.Random(growth)
    scales = side_by_side(
        3000,
        lambda n, scale: exact.overflows(luck, scale) or (growth == 1 and luck.random() < 0.4),
        initial_scale=2.0**10,
        dynamic_growth_steps=growth,
    )
    assert len(set(scales)) > 10


def test_the_same_with_no_arguments_at_all():
    """2^15, doubled after 2,000 clean steps."""
    scales = side_by_side(2200, lambda n, scale: n in (10, 11, 100))
    assert sorted(set(scales)) == [2.0**12, 2.0**13, 2.0**14, 2.0**15]
    assert scales.index(2.0**13, 100) == 100 + 2000


def test_the_same_from_an_odd_scale():
    luck = random.Random(0)
    with pytest.warns(UserWarning, match="not a power of two"):
        ours = Driven(LossScaleOptimizer, initial_scale=1000.0, dynamic_growth_steps=2)
    keras_own = Driven(
        keras.optimizers.LossScaleOptimizer, initial_scale=1000.0, dynamic_growth_steps=2
    )
    a = np.ones((200, 3), np.float32)
    a[[luck.random() < 0.4 for _ in a], 1] = np.inf
    told = [ops.convert_to_numpy(d.run(a, a[:, 0])).tolist() for d in (ours, keras_own)]
    assert told[0] == told[1]
    assert min(told[0]) < 10


def through_fit(kind, *rows, **how):
    optimizer = kind(SGD(2.0**-12), initial_scale=2.0**8, dynamic_growth_steps=5)
    model = line(optimizer, **how)
    fit(model, *rows)
    return weights(model), float(ops.convert_to_numpy(optimizer.dynamic_scale.value))


@pytest.mark.parametrize("how", FIT, ids=str)
def test_the_same_in_fit(how, monkeypatch):
    """Through float16 and backward, and the trainer's own loop, compiled or not."""
    if BACKEND == "torch" and how.get("jit_compile"):  # traced, without a minute of C++
        import torch

        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    rng = np.random.default_rng(0)
    rows = [HUGE if rng.random() < 0.2 else rng.standard_normal() for _ in range(80)]
    ours = through_fit(LossScaleOptimizer, *rows, **how)
    assert ours == through_fit(keras.optimizers.LossScaleOptimizer, *rows, **how)
    assert ours[1] != 2.0**8


def test_they_differ_after_a_non_finite_loss():
    """Keras blames the scale for it; here nobody does, where the loss is seen."""
    rows = [1.0, NAN, 1.0]
    kept = 2.0**8 if LOSS_SEEN else 2.0**7
    assert through_fit(LossScaleOptimizer, *rows) == ([-(2.0**-11)], kept)
    assert through_fit(keras.optimizers.LossScaleOptimizer, *rows) == ([-(2.0**-11)], 2.0**7)


def test_it_is_one_and_takes_its_place():
    optimizer = LossScaleOptimizer(SGD(0.25), 2.0**5, 7, name="mine")
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0**5, 7)
    assert optimizer.name == "mine"
    assert float(ops.convert_to_numpy(optimizer.learning_rate)) == 0.25
    optimizer.learning_rate = 0.5
    assert float(ops.convert_to_numpy(optimizer.inner_optimizer.learning_rate)) == 0.5
    peer = keras.optimizers.LossScaleOptimizer(SGD(0.25), 2.0**5, 7)
    w = keras.Variable(np.ones(2, np.float32))
    for one in (optimizer, peer):
        assert not one.built
        one.build([w])
        assert one.built
    # Keras' variables in Keras' order, and two more behind the wrapper's own.
    names = [v.name for v in optimizer.variables]
    assert [n for n in names if n not in ("history", "ring")] == [v.name for v in peer.variables]
    assert names[len(peer._variables) : len(peer._variables) + 2] == ["history", "ring"]

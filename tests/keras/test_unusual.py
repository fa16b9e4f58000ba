"""Unusual gradients, variables and calls: the step is right, or refused before it writes."""

import math
import threading

import keras
import numpy as np
import pytest
from helpers.keras import BACKEND, SGD, Adam, bits, fit, lifted, line, step, variable
from keras import ops

from gradlift import Cause
from gradlift.errors import MisuseError, StateError
from gradlift.keras import LossScaleOptimizer

INF, NAN = math.inf, math.nan


def by_hand(rule="static:8", inner=None, **how):
    """An optimizer of one variable [1, 1, 1]."""
    held = variable(1.0, 1.0, 1.0)
    optimizer = LossScaleOptimizer(inner or SGD(1.0), rule=rule, **how)
    optimizer.build([held])
    return optimizer, held


def array(values, dtype):
    return ops.convert_to_tensor(np.asarray(values, "float32"), dtype)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_every_dtype(kind):
    optimizer, held = by_hand()
    if kind == "float64" and BACKEND == "jax":
        kind = "float32"  # JAX has no other without x64
    for bad in (INF, NAN):
        optimizer.scale_loss(np.float32(1))
        optimizer.apply([array([8.0, bad, 8.0], kind)], [held])
        assert not optimizer.result.stepped
        assert (held.numpy() == 1).all() if hasattr(held, "numpy") else True
    optimizer.scale_loss(np.float32(1))
    optimizer.apply([array([8.0, 8.0, 8.0], kind)], [held])
    assert optimizer.result.stepped
    assert not ops.convert_to_numpy(held.value).any()


def test_a_float16_gradient_is_unscaled_in_float32():
    """What float16 holds only scaled is there without the scale."""
    optimizer, held = by_hand("static:2^24")
    held.assign(np.zeros(3, np.float32))
    optimizer.scale_loss(np.float32(1))
    optimizer.apply([array([2.0**-6] * 3, "float16")], [held])
    assert ops.convert_to_numpy(held.value).tolist() == [-(2.0**-30)] * 3


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 without x64")
def test_a_float64_gradient_that_leaves_float32_is_skipped():
    optimizer, held = by_hand()
    optimizer.scale_loss(np.float32(1))
    optimizer.apply([ops.convert_to_tensor(np.full(3, 1e40), "float64")], [held])
    assert (optimizer.result.stepped, optimizer.result.culprits) == (False, (held.path,))
    assert (ops.convert_to_numpy(held.value) == 1).all()


@pytest.mark.parametrize("other", ["empty", "0-d", "none"])
def test_gradients_of_nothing_beside_others(other):
    held = variable(1.0, 1.0)
    odd = keras.Variable(np.ones({"empty": (0, 3), "0-d": (), "none": (2,)}[other], np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([odd, held])
    grad = None if other == "none" else ops.convert_to_tensor(np.full(odd.shape, 8.0, np.float32))
    for value, stepped in ((INF, False), (8.0, True)):
        optimizer.scale_loss(np.float32(1))
        optimizer.apply([grad, array([8.0, value], "float32")], [odd, held])
        assert optimizer.result.stepped is stepped
    assert not ops.convert_to_numpy(held.value).any()
    assert (ops.convert_to_numpy(odd.value) == (other == "none")).all()


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g * array(NAN, "float32"),
        lambda g: g / ops.norm(g - g),
        lambda g: ops.cast(g * 1e38, "float32") * 1e38,
    ],
)
def test_gradients_spoiled_after_they_were_unscaled_are_not_applied(edit):
    optimizer, held = by_hand("dynamic:init_scale=8", Adam(0.1))
    before = bits([held, *optimizer.inner_optimizer.variables])
    optimizer.scale_loss(np.float32(1))
    (true,) = optimizer.get_unscaled_gradients([array([8.0, 8.0, 8.0], "float32")])
    optimizer.apply([edit(true)], [held])
    assert not optimizer.result.stepped
    assert bits([held, *optimizer.inner_optimizer.variables]) == before


def test_one_tensor_for_two_variables_is_unscaled_once_each():
    a, b = variable(1.0), variable(1.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([a, b])
    shared = array([8.0], "float32")
    optimizer.scale_loss(np.float32(1))
    optimizer.apply([shared, shared], [a, b])
    assert [float(ops.convert_to_numpy(v.value)[0]) for v in (a, b)] == [0.0, 0.0]


def test_a_tied_layer_is_stepped_once_with_the_sum():
    """One layer at two places of a model."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Model(inputs, layer(layer(inputs)))
    model.compile(lifted(rule="static:8"), lambda y, p: ops.mean(p, axis=-1))
    model.fit(np.ones((1, 1)), np.zeros((1, 1)), verbose=0)
    assert model.get_weights()[0].item() == -1.0  # w^2 has the gradient 2


def test_a_layer_frozen_and_thawed_between_two_fits():
    model = line(lifted(rule="static:8"))
    fit(model, 1.0)
    first = model.get_weights()[0].item()
    layer = model.layers[-1]
    layer.trainable = False
    model.compile(lifted(rule="static:8"), model.loss)
    fit(model, 1.0)
    assert model.get_weights()[0].item() == first
    layer.trainable = True
    model.compile(lifted(rule="static:8"), model.loss)
    fit(model, 1.0)
    assert model.get_weights()[0].item() == first - 1.0


def test_a_variable_that_the_optimizer_does_not_know_is_refused():
    optimizer, held = by_hand()
    with pytest.raises(ValueError, match=r"Unknown variable|cannot be called"):
        step(optimizer, [held, variable(1.0)], [8.0, 8.0, 8.0], [8.0])
    assert (ops.convert_to_numpy(held.value) == 1).all()


@pytest.mark.parametrize("kind", ["complex64", "int32"])
def test_gradients_that_are_none_are_refused_in_words(kind):
    optimizer, held = by_hand()
    optimizer.scale_loss(np.float32(1))
    with pytest.raises(MisuseError, match=f"is {kind}, expected real floating-point"):
        optimizer.apply([ops.convert_to_tensor(np.ones(3, kind))], [held])
    assert (ops.convert_to_numpy(held.value) == 1).all()


def test_a_state_loaded_in_the_middle_of_a_window():
    optimizer, held = by_hand("dynamic:init_scale=8")
    saved = optimizer.state_dict()
    step(optimizer, [held], [INF] * 3)
    assert optimizer.get_scale() == 4.0
    optimizer.scale_loss(np.float32(NAN))  # of a batch that is given up
    optimizer.load_state_dict(saved)
    result = step(optimizer, [held], [1.0] * 3)
    assert (result.stepped, result.scale) == (True, 8.0)
    assert not ops.convert_to_numpy(held.value).any()
    optimizer.scale_loss(np.float32(NAN))
    optimizer.load_state_dict(saved)
    assert step(optimizer, [held], [INF] * 3).cause is Cause.OVERFLOW


def test_a_step_that_raises_can_be_taken_again(monkeypatch):
    optimizer, held = by_hand()

    def full(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.inner_optimizer, "apply", full)
        with pytest.raises(MemoryError):
            step(optimizer, [held], [1.0] * 3)
    assert (ops.convert_to_numpy(held.value) == 1).all()
    assert step(optimizer, [held], [1.0] * 3).stepped
    assert not ops.convert_to_numpy(held.value).any()


def test_threads_side_by_side():
    found = {}

    def train(i):
        optimizer, held = by_hand("dynamic:init_scale=8")
        for n in range(6):
            step(optimizer, [held], [INF if n % 3 == i % 3 else 1.0] * 3)
        found[i] = optimizer.counts[Cause.OVERFLOW], float(ops.convert_to_numpy(held.value)[0])

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), (2, -3.0))


class Store(dict):
    """What Keras gives to `load_own_variables`."""


@pytest.mark.parametrize(
    "value",
    [NAN, INF, -1.0, "text", None, [1, 2], 1j, 2**40],
    ids=repr,
)
def test_stored_variables_of_any_make_are_refused_and_change_nothing(value):
    optimizer, held = by_hand("dynamic:init_scale=8", Adam(0.1))
    step(optimizer, [held], [1.0] * 3)
    store, before = Store(), bits(optimizer.variables)
    optimizer.save_own_variables(store)
    for name in store:
        shape = np.shape(store[name])
        filled = np.full(shape, 0, object)
        filled[...] = value if not isinstance(value, list) else None
        try:
            bad = filled.astype(type(value) if value is not None else object)
        except (TypeError, ValueError):
            bad = filled
        if bits(optimizer.variables) != before:
            pytest.fail(f"{name} changed something")
        try:
            optimizer.load_own_variables(Store({**store, name: bad}))
        except StateError:
            assert bits(optimizer.variables) == before
        else:  # the ring, or a number that may be there
            loaded = [v for v in optimizer.variables if v is not optimizer.ring]
            assert all(np.isfinite(ops.convert_to_numpy(v.value)).all() for v in loaded), name
            optimizer.load_own_variables(store)

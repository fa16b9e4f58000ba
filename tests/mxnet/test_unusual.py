"""Unusual gradients, parameters and calls: the step is right, or refused before it writes."""

import math
import threading

import mxnet as mx
import numpy as np
import pytest
from helpers.mxnet import backward, finite, parameters, same, sgd, step, weights
from mxnet import autograd

import gradlift.mxnet as gl
from gradlift.errors import MisuseError

INF, NAN = math.inf, math.nan


def test_gradients_edited_after_unscale_are_checked_again():
    for bad in (INF, NAN):
        trainer = sgd(parameters(), momentum=0.5)
        scaler, before = gl.init_trainer(trainer, "static:8"), weights(trainer)
        backward(trainer)
        gl.unscale(trainer)
        trainer._params[1].grad()[0, 0] = bad
        trainer.step(1)
        assert (scaler.result.stepped, scaler.result.culprits) == (False, ("b",))
        assert same(weights(trainer), before)
        step(gl, trainer)
        assert scaler.result.stepped
        assert finite(weights(trainer))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")])
def test_float64_beside_float32(dtypes):
    trainer = sgd(parameters(dtypes=dtypes))
    scaler, before = gl.init_trainer(trainer, "static:8"), weights(trainer)
    for spoil, stepped in ((INF, False), (NAN, False), (1.0, True)):
        with autograd.record():
            loss = sum((p.data().astype("float32") * spoil).sum() for p in trainer._params)
            with gl.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        assert scaler.result.stepped is stepped
        if not stepped:
            assert same(weights(trainer), before)
    for now, was in zip(weights(trainer), before, strict=True):
        assert np.allclose(now, was - 0.5, atol=1e-6)


def test_a_float64_gradient_that_leaves_float32_is_skipped():
    trainer = sgd(parameters(dtypes=("float64", "float32")))
    scaler, before = gl.init_trainer(trainer, "static:8"), weights(trainer)
    backward(trainer)
    trainer._params[0].grad()[:] = 1e40
    trainer.step(1)
    assert not scaler.result.stepped
    assert same(weights(trainer), before)


def test_one_parameter_at_two_places_of_a_model():
    """Tied weights: gluon gives the trainer one parameter, and backward the sum."""
    first = mx.gluon.nn.Dense(2, use_bias=False, in_units=2)
    second = mx.gluon.nn.Dense(2, use_bias=False, in_units=2, params=first.params)
    first.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(first.collect_params(), "sgd", {"learning_rate": 1.0})
    scaler = gl.init_trainer(trainer, "static:8")
    with autograd.record():
        loss = second(first(mx.nd.array([[1.0, 0.0]]))).sum()
        with gl.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert scaler.result.stepped
    assert first.weight.data().asnumpy().tolist() == [[-2.0, 0.0], [-2.0, 0.0]]


def test_a_parameter_frozen_and_thawed_in_mid_run():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:8")
    step(gl, trainer)
    frozen = trainer._params[0]
    frozen.grad_req = "null"
    before = weights(trainer)
    with autograd.record(), gl.scale_loss(trainer._params[1].data().sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    after = weights(trainer)
    assert scaler.result.stepped
    assert same(after[:1], before[:1])
    assert not same(after[1:], before[1:])
    frozen.grad_req = "write"
    step(gl, trainer)
    assert not same(weights(trainer)[:1], before[:1])


def test_losses_that_are_none_are_refused_in_words():
    trainer = sgd(parameters())
    gl.init_trainer(trainer, "static:8")
    for loss in (1.0, np.ones(1), None, mx.nd.ones(1, dtype="int32")):
        scaled = gl.scale_loss(loss, trainer)
        with pytest.raises(MisuseError, match=r"wants an array|floating-point loss"), scaled:
            pass


def test_a_state_loaded_in_the_middle_of_a_window():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic:init_scale=8")
    saved, before = scaler.state_dict(), weights(trainer)
    step(gl, trainer, spoil=INF)
    backward(trainer)  # at a scale of 4
    scaler.load_state_dict(saved)
    with pytest.raises(MisuseError, match=r"without scale_loss\(\)"):
        trainer.step(1)
    assert same(weights(trainer), before)
    step(gl, trainer)
    assert (scaler.result.stepped, scaler.result.scale) == (True, 8.0)


def test_an_optimizer_that_raises_half_way_can_step_again(monkeypatch):
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:8")
    backward(trainer)

    def full(*_, **__):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(trainer._updaters[0], "optimizer", trainer._optimizer)
        patch.setattr(type(trainer._optimizer), "update_multi_precision", full)
        patch.setattr(type(trainer._optimizer), "update", full)
        with pytest.raises(MemoryError):
            trainer.step(1)
    assert scaler.steps == 0
    step(gl, trainer)
    assert (scaler.steps, scaler.result.stepped) == (1, True)
    assert finite(weights(trainer))


def test_threads_side_by_side():
    found = {}

    def train(i):
        trainer = sgd(made[i])
        scaler = gl.init_trainer(trainer, "dynamic:init_scale=8")
        for n in range(6):
            step(gl, trainer, 0.5, INF if n % 3 == i % 3 else 1.0)
        found[i] = scaler.skipped_steps, finite(weights(trainer))

    made = [parameters() for _ in range(3)]
    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), (2, True))

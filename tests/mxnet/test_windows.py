"""What belongs to one step: micro-batches, several losses, several optimizers."""

import pytest
from helpers.mxnet import (
    NAN,
    backward,
    losses,
    parameters,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, nd

import gradlift.mxnet as gl
from gradlift import Cause


# Windows
def test_micro_batches_add_up_and_the_scale_is_frozen():
    trainer, plain = (sgd(parameters(grad_req="add")) for _ in range(2))
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=1")
    for _ in range(2):
        for x in (0.1, 0.2, 0.3):
            scale = scaler.get_scale()
            backward(trainer, x)
            with autograd.record():
                found = losses(plain._params, x)
            autograd.backward(found)
            assert scaler.get_scale() == scale
        for each in (trainer, plain):
            each.step(3)
            for p in each._params:
                p.zero_grad()
        assert same(weights(trainer), weights(plain))
    assert scaler.get_scale() == 2.0**18


def test_a_batch_that_was_given_up_spoils_nothing():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    backward(trainer, NAN)
    step(gl, trainer)  # its backward has written over the non-finite gradients
    assert scaler.result.stepped


def test_a_stale_gradient_is_mxnets_own_error():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=1")
    with autograd.record(), gl.scale_loss(trainer._params[0].data().sum(), trainer) as scaled:
        scaled.backward()
    with pytest.raises(UserWarning, match="Gradient of Parameter `b`"):
        trainer.step(1)
    assert (scaler.steps, scaler.get_scale()) == (0, 2.0**16)
    with gl.scale_loss(nd.ones(1), trainer):
        pass  # backward() was forgotten
    with pytest.raises(UserWarning, match="Gradient of Parameter `w`"):
        trainer.step(1)
    step(gl, trainer)
    assert scaler.result.stepped


def test_no_gradients_at_all():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    with gl.scale_loss(nd.ones(1), trainer):
        pass
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.cause is Cause.NO_GRADIENTS
    params = parameters(grad_req="null")
    trainer = sgd(params)
    scaler = gl.init_trainer(trainer, "dynamic")
    with gl.scale_loss(nd.ones(1), trainer):
        pass
    trainer.step(1)
    assert scaler.result.cause is Cause.NO_GRADIENTS
    assert scaler.skipped_steps == 0


def test_parameters_without_gradient_are_left_out():
    params = parameters()
    params[1].grad_req = "null"
    trainer = sgd(params)
    scaler = gl.init_trainer(trainer, "dynamic")
    kept = params[1].data().asnumpy()
    step(gl, trainer)
    assert scaler.result.stepped
    assert same([params[1].data().asnumpy()], [kept])

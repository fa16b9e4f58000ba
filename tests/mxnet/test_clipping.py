"""Clipping measures true gradients."""

import numpy as np
import pytest
from helpers.mxnet import (
    INF,
    NAN,
    backward,
    losses,
    parameters,
    plain_step,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, gluon, nd

import gradlift.mxnet as gl
from gradlift import Cause
from gradlift.errors import MisuseError


# unscale and clipping
def test_unscale_then_clip_by_hand():
    trainer, plain = sgd(parameters()), sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    backward(trainer, 3.0)
    with autograd.record():
        found = losses(plain._params, 3.0)
    autograd.backward(found)
    gl.unscale(trainer)
    gl.unscale(trainer)  # once is enough, twice does no harm
    for each in (trainer, plain):
        gluon.utils.clip_global_norm([p.grad() for p in each._params], 0.25)
        each.step(2)
    assert same(weights(trainer), weights(plain))
    assert scaler.result.grad_norm > 0.25 / 2  # before clipping


def test_an_overflow_cannot_be_clipped_away():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    before = weights(trainer)
    backward(trainer, spoil=INF)
    gl.unscale(trainer)
    for p in trainer._params:
        p.grad()[:] = nd.clip(p.grad(), -1, 1)
    trainer.step(1)
    assert scaler.result.cause is Cause.OVERFLOW
    assert scaler.result.culprits == ("b", "w")
    assert same(weights(trainer), before)


def test_what_was_broken_after_unscale_is_seen_too():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    backward(trainer)
    gl.unscale(trainer)
    trainer._params[0].grad()[:] = NAN
    trainer.step(1)
    assert scaler.result.cause is Cause.OVERFLOW
    assert scaler.result.culprits == ("w",)


def test_scale_loss_after_unscale():
    trainer = sgd(parameters(grad_req="add"))
    gl.init_trainer(trainer)
    backward(trainer)
    gl.unscale(trainer)
    with pytest.raises(MisuseError, match="call unscale\\(\\) once, after the last backward"):
        backward(trainer)
    plain = sgd(parameters(grad_req="add"))
    for p in trainer._params:
        p.zero_grad()  # given up, as one does whose norm was not finite
    step(gl, trainer, 0.3)
    plain_step(plain, 0.3)
    assert same(weights(trainer), weights(plain))
    trainer, plain = sgd(parameters()), sgd(parameters())
    gl.init_trainer(trainer)
    backward(trainer, 3.0)
    gl.unscale(trainer)
    step(gl, trainer, 0.3)  # "write": what was unscaled is gone
    plain_step(plain, 0.3)
    assert same(weights(trainer), weights(plain))
    backward(trainer, spoil=INF)
    gl.unscale(trainer)  # given up
    step(gl, trainer, 0.3)
    plain_step(plain, 0.3)
    assert same(weights(trainer), weights(plain))


def test_what_was_unscaled_and_given_up_is_stale():
    """A backward that does not reach `b` leaves it without the scale: it must not be divided."""
    trainer = sgd(parameters())
    gl.init_trainer(trainer)
    w, b = trainer._params
    kept = b.data().asnumpy()
    for p in (b, w):
        with autograd.record(), gl.scale_loss(p.data().sum(), trainer) as scaled:
            scaled.backward()
        if p is b:
            gl.unscale(trainer)
    with pytest.raises(UserWarning, match="Gradient of Parameter `b`"):
        trainer.step(1)
    assert same([b.data().asnumpy()], [kept])


@pytest.mark.parametrize("rule", ["dynamic", "off"])
def test_max_norm_is_clipping_by_hand(rule):
    trainer, plain = sgd(parameters()), sgd(parameters())
    scaler = gl.init_trainer(trainer, rule, max_norm=0.25)
    for x in (3.0, 2.0**-10):  # clipped, and not
        step(gl, trainer, x, batch_size=2)
        with autograd.record():
            found = losses(plain._params, x)
        autograd.backward(found)
        gluon.utils.clip_global_norm([p.grad() for p in plain._params], 0.25 * 2)
        plain.step(2)
        for a, b in zip(weights(trainer), weights(plain), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)  # MXNet adds 1e-8
    assert scaler.result.grad_norm < 0.25

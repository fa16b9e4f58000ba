"""A Gluon loop: what a step does, and the scale on its way."""

import math

import mxnet as mx
import numpy as np
import pytest
from helpers.mxnet import (
    INF,
    NAN,
    finite,
    losses,
    parameters,
    plain_step,
    run,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, gluon, nd

import gradlift.mxnet as gl
from gradlift import Cause, Verdict


# What a step does
def test_three_good_steps_one_overflow_one_good_step():
    trainer, plain = sgd(parameters(), momentum=0.5), sgd(parameters(), momentum=0.5)
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=3")
    scales = []
    for spoil in (1, 1, 1, INF, 1):
        step(gl, trainer, 0.3, spoil, batch_size=3)
        if spoil == 1:
            plain_step(plain, 0.3, batch_size=3)
        assert same(weights(trainer), weights(plain))
        scales.append(scaler.get_scale())
    assert [math.log2(s) for s in scales] == [16, 16, 17, 16, 16]
    assert (scaler.steps, scaler.skipped_steps) == (5, 1)
    assert scaler.loss_scale == scaler.get_scale()


def test_the_result_says_what_happened():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:2^10")
    assert scaler.result is None
    gradient = np.concatenate([w.ravel() for w in weights(trainer)])  # of the sum of w^2 / 2
    step(gl, trainer, batch_size=4)
    result = scaler.result
    assert (result.verdict, result.cause, result.scale) == (Verdict.APPLY, Cause.NONE, 2.0**10)
    assert result.grad_norm == pytest.approx(np.linalg.norm(gradient) / 4, rel=1e-6)
    assert (result.culprits, result.notes, result.micro_batch) == ((), (), None)
    step(gl, trainer, spoil=NAN)
    assert str(scaler.result) == "skip (overflow) at scale 2^10, first non-finite: b (nan)"
    assert scaler.result.culprits == ("b", "w")
    assert math.isnan(scaler.result.grad_norm)


def test_off_is_plain_training():
    trainer, plain = sgd(parameters()), sgd(parameters())
    scaler = gl.init_trainer(trainer, "off")
    for _ in range(2):
        step(gl, trainer, 0.3)
        plain_step(plain, 0.3)
    plain_step(trainer, 0.3)  # nothing was promised to it
    plain_step(plain, 0.3)
    assert same(weights(trainer), weights(plain))
    assert scaler.result.stepped
    step(gl, trainer, spoil=NAN)
    assert not finite(weights(trainer))


def test_auto_is_the_cautious_one_since_nothing_retries():
    assert str(gl.init_trainer(sgd(parameters()), "auto").rule) != "headroom"
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "auto")
    for _ in range(30):
        step(gl, trainer, 2.0**-20)
    assert scaler.skipped_steps == 0
    assert scaler.get_scale() > 2.0**16


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_a_scale_so_large_that_its_inverse_over_the_batch_is_no_normal_number(direction):
    """MXNet refuses to read such a rescale_grad."""
    trainer, plain = (sgd(parameters(), rescale_grad=direction) for _ in range(2))
    gl.init_trainer(trainer, "static:2^126")
    step(gl, trainer, 2.0**-6, batch_size=8)
    plain_step(plain, 2.0**-6, batch_size=8)
    assert same(weights(trainer), weights(plain))


def test_climbing():
    """rescale_grad=-1: the norm is still a norm, and is clipped."""
    trainer = sgd(parameters(), learning_rate=1.0, rescale_grad=-1.0)
    scaler = gl.init_trainer(trainer, "dynamic", max_norm=0.25)
    before = np.concatenate([w.ravel() for w in weights(trainer)])
    step(gl, trainer)
    after = np.concatenate([w.ravel() for w in weights(trainer)])
    assert scaler.result.grad_norm == pytest.approx(np.linalg.norm(before), rel=1e-6)
    assert np.linalg.norm(after - before) == pytest.approx(0.25, rel=1e-6)
    assert (np.abs(after) > np.abs(before)).all()


def test_an_optimizer_that_is_used_again_carries_no_scale():
    """A new trainer, after layers were frozen say, takes rescale_grad over from its optimizer."""
    found = []
    for scaled in (True, False):
        params, optimizer = parameters(), mx.optimizer.SGD(learning_rate=0.5)
        for _ in range(2):
            trainer = gluon.Trainer(params, optimizer)
            if scaled:
                gl.init_trainer(trainer, "dynamic", max_norm=100.0)
                step(gl, trainer, 0.3)
                step(gl, trainer, spoil=INF)
            else:
                plain_step(trainer, 0.3)
        found.append(weights(trainer))
    assert same(*found)


# Losses
def test_a_loss_alone_a_list_a_tuple():
    trainer = sgd(parameters())
    gl.init_trainer(trainer, "static:8")
    with autograd.record():
        (loss,) = losses(trainer._params, 1.0)
        for given in (loss, [loss], (loss, loss)):
            with gl.scale_loss(given, trainer) as scaled:
                assert isinstance(scaled, list) == isinstance(given, (list, tuple))
                first = scaled[0] if isinstance(scaled, list) else scaled
                assert first.asscalar() == 8 * loss.asscalar()


def test_a_loss_may_be_scaled_outside_of_record():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:8")
    with autograd.record():
        (loss,) = losses(trainer._params, 1.0)
    with gl.scale_loss(loss, trainer) as scaled:
        assert not autograd.is_recording()
        scaled.backward()
    trainer.step(1)
    assert scaler.result.stepped


def test_a_float16_loss_caps_the_scale():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=1")
    for _ in range(2):
        with autograd.record():
            (loss,) = losses(trainer._params, 2.0**-8)
            with gl.scale_loss(loss.astype("float16"), trainer) as scaled:
                assert scaled.dtype == np.float32
                scaled.backward()
        trainer.step(1)
        assert scaler.result.stepped
        assert scaler.result.scale == scaler.get_scale() == 2.0**15
    assert scaler.result.notes == ("loss computed in float16: its scale is capped at 2^15",)


# Nets
def test_a_hybridized_net_of_unknown_shape():
    mx.random.seed(0)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh"), gluon.nn.BatchNorm(), gluon.nn.Dense(1))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.02})
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=20")  # no shape is known yet
    x = nd.random.normal(shape=(32, 4))
    y = x.sum(axis=1, keepdims=True)
    rule, told = gluon.loss.L2Loss(), []
    for _ in range(60):
        with autograd.record():
            loss = rule(net(x), y)
            with gl.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(32)
        told.append(loss.mean().asscalar())
    assert told[-1] < told[0] / 4
    assert scaler.skipped_steps == 0
    assert scaler.get_scale() == 2.0**19


def test_the_numpy_interface():
    mx.npx.set_np()
    try:
        w = gluon.Parameter("w", shape=3)
        w.initialize(mx.init.One())
        trainer = sgd([w], learning_rate=1.0)
        scaler = gl.init_trainer(trainer, "dynamic")
        for x in (mx.np.array([1.0, 2.0, 3.0]), mx.np.array([1.0, 3e38, 3.0])):
            with autograd.record():
                loss = (w.data() * x / 4).sum()
                with gl.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(1)
        assert scaler.result.cause is Cause.OVERFLOW
        assert w.data().asnumpy().tolist() == [0.75, 0.5, 0.25]
    finally:
        mx.npx.reset_np()


def test_ops_that_are_losses_follow_the_scale():
    """After amp.init() SoftmaxOutput takes its scale from MXNet's first scaler, and no head."""
    code = """
import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp
import gradlift.mxnet as gl
amp.init()
w = gluon.Parameter("w", shape=(2, 3)); w.initialize(mx.init.One())
trainer = gluon.Trainer([w], "sgd", {"learning_rate": 1.0})
scaler = gl.init_trainer(trainer, "dynamic:growth_interval=1")
for _ in range(3):
    before = w.data().asnumpy()
    with autograd.record():
        out = nd.SoftmaxOutput(w.data(), nd.array([0, 1]))
        with gl.scale_loss(out, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(1)
    wanted = 1 - out.asnumpy()[0, 0]
    print((w.data().asnumpy() - before)[0, 0] / wanted)
print(scaler.get_scale())
"""
    *moved, scale = map(float, run(code).split())
    assert moved == pytest.approx([1, 1, 1], rel=1e-5)
    assert scale == 2.0**19

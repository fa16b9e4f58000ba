"""Why a step was skipped, and which tensor, loss or micro-batch shows it."""

import math

import pytest
from helpers.mxnet import (
    INF,
    NAN,
    backward,
    parameters,
    sgd,
    step,
)
from mxnet import autograd, nd

import gradlift.mxnet as gl
from gradlift import Cause


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_non_finite_loss_keeps_the_scale(bad):
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    step(gl, trainer, x=bad)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    assert scaler.get_scale() == 2.0**16


def test_one_non_finite_sample_is_enough():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    w = trainer._params[0]
    with autograd.record():
        each = w.data() * nd.array([1, math.inf, 1])
        with gl.scale_loss(each, trainer) as scaled:
            scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.cause is Cause.LOSS_NONFINITE


def test_a_finite_loss_whose_sum_overflows_counts_as_finite():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:1")
    w = trainer._params[0]
    with autograd.record(), gl.scale_loss([w.data() * 0 + 3e38], trainer) as scaled:
        autograd.backward(scaled)
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.stepped


def test_finite_losses_whose_sums_overflow_both_ways():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "static:1")
    w = trainer._params[0]
    with autograd.record():
        given = [w.data() * 0 + 3e38, w.data() * 0 - 3e38]
        with gl.scale_loss(given, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.stepped


def test_the_micro_batch_with_the_non_finite_loss_is_named():
    trainer = sgd(parameters(grad_req="add"))
    scaler = gl.init_trainer(trainer, "dynamic")
    for x in (1.0, NAN, 1.0):
        backward(trainer, x)
    trainer.step(3)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    assert scaler.result.micro_batch == 1
    assert scaler.get_scale() == 2.0**16

"""A step that is not finite changes nothing, and says so."""

import mxnet as mx
from helpers.mxnet import (
    INF,
    NAN,
    parameters,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, gluon

import gradlift.mxnet as gl


def test_a_skipped_step_leaves_schedule_and_moments_alone():
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = gluon.Trainer(parameters(), "adam", {"lr_scheduler": schedule})
    scaler = gl.init_trainer(trainer)
    step(gl, trainer)
    held = [s.asnumpy() for pair in trainer._updaters[0].states.values() for s in pair]
    before, rate = weights(trainer), trainer.learning_rate
    step(gl, trainer, spoil=NAN)
    assert not scaler.result.stepped
    assert trainer.optimizer.num_update == 1
    assert trainer.learning_rate == rate
    assert same(weights(trainer), before)
    after = [s.asnumpy() for pair in trainer._updaters[0].states.values() for s in pair]
    assert same(after, held)
    step(gl, trainer)
    assert trainer.optimizer.num_update == 2


def test_a_gradient_from_a_skipped_step_is_not_used_later():
    """MXNet takes it for fresh, and refuses every step until that parameter is used again."""
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    w, b = trainer._params
    step(gl, trainer, spoil=INF)
    kept = b.data().asnumpy()
    with autograd.record(), gl.scale_loss(w.data().sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.stepped
    assert same([b.data().asnumpy()], [kept])

"""Calls and settings that cannot work are refused with what to do instead."""

import pytest
from helpers.mxnet import (
    parameters,
    plain_step,
    same,
    sgd,
    step,
    weights,
)
from mxnet import nd

import gradlift.mxnet as gl
from gradlift.errors import MisuseError, SettingsError


# Calls in the wrong order
def test_misuse_is_an_error():
    trainer = sgd(parameters())
    for call in (lambda: enter(nd.ones(1), trainer), lambda: gl.unscale(trainer)):
        with pytest.raises(MisuseError, match=r"call gradlift.mxnet.init_trainer\(trainer\) first"):
            call()
    with pytest.raises(MisuseError, match=r"wants a gluon.Trainer, this is SGD"):
        gl.init_trainer(trainer.optimizer)
    with pytest.raises(SettingsError, match="max_norm is 0, expected a number above 0"):
        gl.init_trainer(trainer, max_norm=0)
    with pytest.raises(SettingsError, match="did you mean 'mxnet'"):
        gl.init_trainer(trainer, "mxnte")
    gl.init_trainer(trainer)  # what was refused has left nothing behind
    with pytest.raises(MisuseError, match="was called before on this trainer"):
        gl.init_trainer(trainer)
    with pytest.raises(MisuseError, match=r"unscale\(\) was called before scale_loss"):
        gl.unscale(trainer)
    before = weights(trainer)
    with pytest.raises(MisuseError, match=r"trainer.step\(\) was called without scale_loss"):
        plain_step(trainer)
    assert same(weights(trainer), before)
    with pytest.raises(MisuseError, match="an array or a list of them, this is float"):
        enter([1.0], trainer)
    with pytest.raises(MisuseError, match="a floating-point loss, this is int32"):
        enter(nd.ones(1, dtype="int32"), trainer)
    step(gl, trainer)


def enter(loss, trainer):
    with gl.scale_loss(loss, trainer):
        pass


def test_mxnets_own_scaler_beside_ours():
    from mxnet.contrib.amp.loss_scaler import LossScaler

    trainer = sgd(parameters())
    trainer._amp_loss_scaler = LossScaler()
    with pytest.raises(MisuseError, match=r"MXNet's own amp.init_trainer\(\) as well"):
        gl.init_trainer(trainer)
    trainer = sgd(parameters())
    gl.init_trainer(trainer)
    trainer._amp_loss_scaler = LossScaler()
    with pytest.raises(MisuseError, match="leave that call out"):
        step(gl, trainer)

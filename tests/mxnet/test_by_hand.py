"""Loops by hand with `LossScaler` and `DynamicLossScaler`, beside the originals."""

import math

import mxnet as mx
import numpy as np
import pytest
from helpers.mxnet import INF, NAN, ONE, TWO, parameters, same, sgd, step, weights
from mxnet import autograd
from mxnet.contrib.amp.loss_scaler import LossScaler

import gradlift.mxnet as gl
from gradlift.errors import MisuseError


def given(values, devices=ONE):
    """A parameter whose gradients are these, one a device."""
    param = mx.gluon.Parameter("weight", shape=2)
    param.initialize(ctx=list(devices))
    for grad, value in zip(param.list_grad(), values, strict=True):
        grad[:] = value
    return param


GOOD, BAD = given([1.0]), given([INF])


def test_mxnets_own_over_ten_thousand_looks():
    theirs, ours = LossScaler(), gl.LossScaler()
    rng = np.random.default_rng(0)
    scales = set()
    for i in range(10_000):
        bad = rng.random() < (1 / 3000 if theirs.loss_scale < 2.0**24 else 1 / 100)
        params = [BAD if bad else GOOD]
        assert ours.has_overflow(params) == theirs.has_overflow(params) == bad
        assert ours.loss_scale == theirs.loss_scale, i
        scales.add(ours.loss_scale)
    assert len(scales) > 2
    assert ours.steps == 9_999  # the last look has not moved it yet


def test_update_scale_moves_at_once_and_only_once():
    scaler = gl.LossScaler()
    assert scaler.has_overflow([BAD])
    scaler.update_scale(True)
    assert scaler.loss_scale == 2.0**15
    assert not scaler.has_overflow([GOOD])
    assert scaler.loss_scale == 2.0**15


def tolerant(overflows, scale, factor, window, tolerance):
    """gluon-nlp's scales, in our words: the share of overflows since the last change counts."""
    changed = overflowed = -1
    count, scales = 0, []
    for now, bad in enumerate(overflows):
        if bad:
            overflowed, count = now, count + 1
            if count / (now - changed) >= tolerance:
                scale, changed, count = scale / factor, now, 0
        elif (now - overflowed) % window == 0:
            scale, changed = scale * factor, now
        scales.append(scale)
    return scales


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("window", [7, 100])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_gluon_nlps_scales(tolerance, window, share):
    rng = np.random.default_rng(window)
    overflows = (rng.random(2000) < share).tolist()
    scaler, scales = gl.DynamicLossScaler(2.0**10, 2.0, window, tolerance), []
    for bad in overflows:
        scaler.update_scale(bad)
        scales.append(scaler.loss_scale)
    wanted = tolerant(overflows, 2.0**10, 2.0, window, tolerance)
    inside = next((i for i, s in enumerate(wanted) if not 2.0**-126 <= s <= 2.0**126), 2000)
    assert inside > 500
    assert scales[:inside] == wanted[:inside]
    assert len(set(scales)) > 2 or tolerance == 0.5  # which a fifth of the steps never reaches


def test_defaults_are_gluon_nlps():
    scaler = gl.DynamicLossScaler()
    rule = scaler.rule
    told = scaler.loss_scale, rule.growth_factor, rule.growth_interval, rule.tolerance
    assert told == (2.0**15, 2.0, 2000, 0.01)


def loop(scaler, params, trainer, spoils):
    """A fine-tuning script's own: the batch size carries the scale."""
    for spoil in spoils:
        with autograd.record():
            loss = (params[0].data() ** 2).sum() * scaler.loss_scale
        loss.backward()
        params[0].grad()[:] *= spoil
        overflow = scaler.has_overflow(params)
        if not overflow:
            trainer.step(1 * scaler.loss_scale)
        scaler.update_scale(overflow)


def test_a_loop_by_hand_ends_where_one_without_a_scale_does():
    (first, _), (second, _) = parameters(), parameters()
    scaler, none = gl.DynamicLossScaler(8.0, scale_window=2), gl.DynamicLossScaler(1.0)
    none.update_scale = lambda overflow: None
    loop(scaler, [first], sgd([first], 0.125), [1, INF, 1, NAN, 1, 1])
    loop(none, [second], sgd([second], 0.125), [1, 1, 1, 1])
    assert same([first.data().asnumpy()], [second.data().asnumpy()])
    assert (scaler.steps, scaler.skipped_steps, scaler.loss_scale) == (6, 2, 4.0)
    again = gl.DynamicLossScaler(8.0, scale_window=2)
    again.load_state_dict(scaler.state_dict())
    assert again.loss_scale == 4.0


def test_every_device_is_looked_at():
    param = given([1.0, NAN], TWO)
    assert not LossScaler().has_overflow([param])
    assert gl.LossScaler().has_overflow([param])
    assert gl.DynamicLossScaler().has_overflow([param])


def test_beside_a_trainers_own_scaler():
    trainer = sgd(parameters())
    scaler = gl.init_loss_scaling(trainer, "dynamic:init_scale=8")
    step(gl, trainer)
    assert not scaler.has_overflow()
    before, held = scaler.loss_scale, weights(trainer)
    trainer._params[0].grad()[:] = INF
    assert scaler.has_overflow(trainer._params)
    assert not scaler.has_overflow(trainer._params[1:])
    assert scaler.loss_scale == before
    assert same(weights(trainer), held)
    with pytest.raises(MisuseError, match="leave the call out"):
        scaler.update_scale(True)
    assert math.isfinite(scaler.result.grad_norm)


def test_scripts_read_and_set_the_scaler_at_the_trainer():
    """gluon-nlp's clip by `trainer._amp_loss_scaler.loss_scale`; sockeye sets `_scale_seq_len`."""
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer)
    trainer._amp_loss_scaler._scale_seq_len = 2
    assert scaler.rule.growth_interval == scaler._scale_seq_len == 2
    for spoil in (1, 1, 1, 1, 1):
        step(gl, trainer, spoil=spoil)
        assert trainer._amp_loss_scaler.loss_scale == scaler.get_scale()
    assert scaler.loss_scale == 2.0**18
    held = weights(trainer)
    step(gl, trainer, spoil=INF)
    assert same(weights(trainer), held)
    with pytest.raises(MisuseError, match=r"after the first step.*growth_interval=5"):
        scaler._scale_seq_len = 5
    off = sgd(parameters())
    gl.init_trainer(off, "off")
    step(gl, off, spoil=INF)  # nothing is looked at, by MXNet neither
    assert not np.isfinite(weights(off)[0]).all()

"""Beside MXNet's own LossScaler: the same scales, skips and weights; and where it goes wrong."""

import types

import mxnet as mx
import numpy as np
import pytest
from conformance.exact import overflows
from helpers.mxnet import HALF, TWO, Spoil, finite, losses, parameters, same, sgd, step, weights
from mxnet import autograd, gluon, nd
from mxnet.contrib.amp import amp
from mxnet.contrib.amp.loss_scaler import LossScaler

import gradlift.mxnet as gl
from gradlift import Cause, Reading, rules

INF, NAN = float("inf"), float("nan")


def give_mxnets(trainer, interval=2000):
    """What amp.init_trainer() does, without amp.init(), which wraps MXNet's ops for good."""
    scaler = trainer._amp_loss_scaler = LossScaler()
    scaler._scale_seq_len = interval
    trainer._amp_original_scale = trainer._scale
    return scaler


def pair(interval, make=lambda: sgd(parameters(), 2.0**-6, momentum=0.5)):
    """Two equal trainers: MXNet's scaler on one, ours on the other."""
    theirs, ours = make(), make()
    rule = f"mxnet:growth_interval={interval}"
    return theirs, give_mxnets(theirs, interval), ours, gl.init_trainer(ours, rule)


def clipped_step(module, trainer, x, spoil, batch_size):
    with autograd.record(), module.scale_loss(losses(trainer._params, x, spoil), trainer) as scaled:
        autograd.backward(scaled)
    module.unscale(trainer)
    gluon.utils.clip_global_norm([p.grad() for p in trainer._params], 0.5, check_isfinite=False)
    trainer.step(batch_size)


def test_elementwise_float16_is_mxnets():
    """float16 weights and gradients, which overflow by themselves; float32 masters."""

    def make():
        return sgd(parameters(dtypes=HALF), 2.0**-6, momentum=0.5, multi_precision=True)

    theirs, peer, ours, scaler = pair(3, make)
    rng = np.random.default_rng(2)
    for i in range(400):
        x = float(rng.standard_normal()) * 2.0 ** float(rng.integers(-12, 3))
        step(amp, theirs, x, batch_size=3)
        step(gl, ours, x, batch_size=3)
        assert peer.loss_scale == scaler.get_scale(), i
        assert same(weights(ours), weights(theirs)), i
    assert 20 < scaler.skipped_steps < 380


def test_a_dense_net_is_mxnets():
    def make():
        mx.random.seed(0)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(8, activation="tanh", in_units=4), gluon.nn.Dense(1, in_units=8))
        net.initialize(mx.init.Xavier(), force_reinit=True)
        net.hybridize()
        nets.append(net)
        return gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})

    nets = []
    theirs, peer, ours, scaler = pair(3, make)
    rng = np.random.default_rng(3)
    for i in range(60):
        x, spoil = nd.array(rng.standard_normal((8, 4))), INF if rng.random() < 0.2 else 1.0
        for module, trainer, net in ((amp, theirs, nets[0]), (gl, ours, nets[1])):
            with autograd.record():
                out = Spoil(spoil)(net(x))
                loss = gluon.loss.L2Loss()(out, x.sum(axis=1, keepdims=True))
                with module.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(8)
        assert peer.loss_scale == scaler.get_scale(), i
        assert same(weights(ours), weights(theirs)), i
    assert 5 < scaler.skipped_steps < 30


@pytest.mark.parametrize("one_step", [step, clipped_step], ids=["plain", "clipped"])
def test_scales_skips_and_weights_are_mxnets(one_step):
    theirs, peer, ours, scaler = pair(interval=5)
    rng = np.random.default_rng(0)
    skipped, seen = 0, set()
    for i in range(2000):
        x = float(rng.standard_normal())
        spoil = float(rng.choice([INF, -INF, NAN])) if overflows(rng, peer.loss_scale) else 1.0
        before = weights(theirs)
        one_step(amp, theirs, x, spoil, batch_size=3)
        one_step(gl, ours, x, spoil, batch_size=3)
        assert peer.loss_scale == scaler.get_scale(), i
        assert same(weights(ours), weights(theirs)), i
        assert scaler.result.stepped != same(weights(ours), before), i
        skipped += not scaler.result.stepped
        seen.add(peer.loss_scale)
    assert scaler.skipped_steps == skipped > 100
    assert len(seen) > 10
    assert max(seen) == 2.0**24


def test_a_change_takes_effect_one_step_late():
    theirs, peer, ours, scaler = pair(interval=3)
    scales = []
    for spoil in (1, INF, 1, 1, 1, 1, 1, 1):
        step(amp, theirs, spoil=spoil)
        step(gl, ours, spoil=spoil)
        assert peer.loss_scale == scaler.get_scale()
        scales.append(scaler.result.scale)
    assert [np.log2(s) for s in scales] == [16, 16, 16, 15, 15, 15, 16, 16]


def test_the_preset_over_twenty_thousand_steps():
    good, bad = nd.ones(1), nd.array([INF])
    peer, rule = LossScaler(), rules.preset("mxnet")
    state = rule.init()
    rng = np.random.default_rng(1)
    grown = 0
    for i in range(20_000):
        overflow = rng.random() < (1 / 3000 if peer.loss_scale < 2.0**24 else 1 / 100)
        assert peer.has_overflow([types.SimpleNamespace(_grad=[bad if overflow else good])]) == (
            overflow
        )
        grown += peer.loss_scale > state.scale
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        assert peer.loss_scale == state.scale, i
    assert grown > 3


# Where MXNet's own goes wrong


def test_mxnet_looks_at_the_first_device_only():
    def make():
        return sgd(parameters(TWO), kvstore=None)

    theirs, peer, ours, scaler = pair(5, make)
    step(amp, theirs, spoil=[1.0, INF])
    assert peer._next_loss_scale == 2.0**16  # it has seen nothing,
    assert not finite(weights(theirs))  # and the second device's weights are lost

    before = weights(ours)
    step(gl, ours, spoil=[1.0, INF])
    assert same(weights(ours), before)
    assert scaler.result.cause is Cause.OVERFLOW
    assert scaler.result.notes == ("only on cpu(1)",)
    step(gl, ours)
    step(gl, ours)
    assert scaler.result.stepped
    assert scaler.result.scale == 2.0**15
    assert finite(weights(ours))


def test_mxnets_default_on_several_devices_applies_an_overflow():
    """Its kvstore has moved the weights before its scaler looks."""
    theirs, _, ours, scaler = pair(5, lambda: sgd(parameters(TWO)))
    step(amp, theirs, spoil=[1.0, INF])
    assert not finite(weights(theirs))
    before = weights(ours)
    step(gl, ours, spoil=[1.0, INF])
    assert same(weights(ours), before)
    assert not scaler.result.stepped


def test_mxnet_cannot_look_at_float16_beside_float32():
    def make():
        return sgd(parameters(dtypes=("float16", "float32")), multi_precision=True)

    theirs, _, ours, scaler = pair(5, make)
    with pytest.raises(mx.MXNetError, match="data type do not match"):
        step(amp, theirs, x=2.0**-8)
    step(gl, ours, x=2.0**-8)
    assert scaler.result.stepped


def test_a_non_finite_loss_lowers_mxnets_own_scale_at_every_step():
    theirs, peer, ours, scaler = pair(5)
    for _ in range(10):
        step(amp, theirs, x=NAN)
        step(gl, ours, x=NAN)
        assert scaler.result.cause is Cause.LOSS_NONFINITE
    assert peer._next_loss_scale == 2.0**6
    assert scaler.get_scale() == 2.0**16

"""Stories of a Gluon loop: what moves, what does not, and what is said."""

import math

import mxnet as mx
import numpy as np
import pytest
from gluon_nets import (
    backward,
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
from gradlift.errors import MisuseError, SettingsError, TrainingHalted

INF, NAN = math.inf, math.nan


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


def test_what_is_used_is_checked():
    """Finite as it stands, infinite when it has been rescaled."""
    trainer = sgd(parameters(), rescale_grad=2.0**127)
    scaler = gl.init_trainer(trainer, "static:1")
    before = weights(trainer)
    step(gl, trainer, 4.0)
    assert scaler.result.cause is Cause.OVERFLOW
    assert same(weights(trainer), before)


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


@pytest.mark.parametrize("dead", [NAN, INF])
def test_a_dead_loss_keeps_the_scale(dead):
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    step(gl, trainer, x=dead)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    assert scaler.get_scale() == 2.0**16


def test_one_dead_sample_is_enough():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    w = trainer._params[0]
    with autograd.record():
        each = w.data() * nd.array([1, math.inf, 1])
        with gl.scale_loss(each, trainer) as scaled:
            scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.result.cause is Cause.LOSS_NONFINITE


def test_a_finite_loss_whose_sum_overflows_is_alive():
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


def test_the_dead_micro_batch_is_named():
    trainer = sgd(parameters(grad_req="add"))
    scaler = gl.init_trainer(trainer, "dynamic")
    for x in (1.0, NAN, 1.0):
        backward(trainer, x)
    trainer.step(3)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    assert scaler.result.micro_batch == 1
    assert scaler.get_scale() == 2.0**16


def test_a_batch_that_was_given_up_spoils_nothing():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    backward(trainer, NAN)
    step(gl, trainer)  # its backward has written over the dead gradients
    assert scaler.result.stepped


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


# Calls in the wrong order


def test_misuse_is_told():
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


def test_limits():
    trainer = sgd(parameters())
    gl.init_trainer(trainer, "dynamic:init_scale=4,min_scale=4", on_floor="warn")
    with pytest.warns(UserWarning, match=r"at the smallest scale, 2\^2: .* gradient: b") as warned:
        step(gl, trainer, spoil=INF)
    assert not warned[0].filename.startswith(gl.__path__[0])
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, max_consecutive_skips=1)
    step(gl, trainer, spoil=INF)
    with pytest.raises(TrainingHalted, match=r"2 steps in a row .* First non-finite gradient: b"):
        step(gl, trainer, spoil=INF)
    assert (scaler.result.verdict, scaler.steps) == (Verdict.HALT, 2)

"""16-bit parameters and their FP32 masters."""

import numpy as np
import pytest
from helpers.mxnet import (
    HALF,
    INF,
    backward,
    losses,
    parameters,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd

import gradlift.mxnet as gl
from gradlift import Cause
from gradlift.errors import MisuseError


def test_float16_weights_with_masters():
    """Each update is 2^-18 of a weight, of which float16 has 2^-11 at best."""
    trainer = sgd(parameters(dtypes=HALF), learning_rate=2.0**-10, multi_precision=True)
    scaler = gl.init_trainer(trainer, "static:2^8")
    start = [w.astype(np.float32) for w in weights(trainer)]
    for _ in range(100):
        step(gl, trainer, 2.0**-8)
    assert scaler.skipped_steps == 0
    masters = [trainer._updaters[0].states[i][1].asnumpy() for i in range(2)]
    for master, first in zip(masters, start, strict=True):
        np.testing.assert_allclose(master - first, -first * 100 * 2.0**-18, rtol=0.01)
    step(gl, trainer, spoil=INF)
    assert scaler.result.culprits == ("b", "w")
    assert same([trainer._updaters[0].states[i][1].asnumpy() for i in range(2)], masters)


def test_float16_gradients_are_clipped_without_unscaling_them():
    trainer = sgd(parameters(dtypes=HALF), learning_rate=2.0**20, multi_precision=True)
    scaler = gl.init_trainer(trainer, "static:2^24", max_norm=2.0**-28)
    start = np.concatenate([w.ravel().astype(np.float32) for w in weights(trainer)])
    step(gl, trainer, 2.0**-24)
    masters = [trainer._updaters[0].states[i][1].asnumpy().ravel() for i in range(2)]
    assert scaler.result.grad_norm == pytest.approx(np.linalg.norm(start) * 2.0**-24, rel=1e-3)
    moved = np.linalg.norm(np.concatenate(masters) - start)
    coefficient = 2.0**-28 / (scaler.result.grad_norm + 1e-6)  # torch's
    assert moved == pytest.approx(2.0**20 * scaler.result.grad_norm * coefficient, rel=1e-3)


def test_float16_weights_without_masters_are_refused():
    params = parameters(dtypes=("float16", "float32"))
    with pytest.raises(MisuseError, match=r"w is a float16 parameter: .*'multi_precision': True"):
        gl.init_trainer(sgd(params))
    params = parameters(dtypes=HALF)
    with pytest.raises(MisuseError, match="w and 1 more are float16 parameters"):
        gl.init_trainer(sgd(params))
    trainer = sgd(parameters())
    gl.init_trainer(trainer)
    for p in trainer._params:
        p.cast("float16")
    backward(trainer)
    with pytest.raises(MisuseError, match="float16 parameters"):
        trainer.step(1)


def test_why_they_are_refused():
    trainer = sgd(parameters(dtypes=HALF))
    before = weights(trainer)
    trainer._scale = 2.0**-20
    with autograd.record():
        found = [each * 2.0**20 for each in losses(trainer._params, 2.0**-8)]
    autograd.backward(found)
    trainer.step(64)  # 2^-26 is 0 in float16
    assert same(weights(trainer), before)


def test_unscaling_float16_gradients_warns():
    trainer = sgd(parameters(dtypes=HALF), multi_precision=True)
    scaler = gl.init_trainer(trainer, "static:2^8")
    backward(trainer, 2.0**-8)
    with pytest.warns(UserWarning, match="use init_trainer\\(..., max_norm=...\\)") as told:
        gl.unscale(trainer)
    assert told[0].filename == __file__
    trainer.step(1)
    assert scaler.result.stepped


def test_a_weight_whose_master_leaves_float16_stays_at_its_largest_number():
    trainer = sgd(parameters(dtypes=HALF), learning_rate=-(2.0**17), multi_precision=True)
    scaler = gl.init_trainer(trainer, "static:1")
    step(gl, trainer)
    assert scaler.result.stepped
    assert scaler.result.cause is Cause.WEIGHT_RANGE
    assert "stays at 65504" in scaler.result.notes[-1]
    values = np.concatenate([w.ravel() for w in weights(trainer)])
    assert np.isfinite(values).all()
    assert 65504 in np.abs(values)


def test_weights_that_are_not_finite_are_named_at_the_first_bad_step():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer)
    name = trainer._params[0].name
    value = trainer._params[0].data().asnumpy()
    value.flat[0] = np.nan
    trainer._params[0].set_data(value)
    step(gl, trainer)
    assert scaler.result.skipped
    assert f"the weight {name} holds nan itself" in scaler.result.notes[-1]

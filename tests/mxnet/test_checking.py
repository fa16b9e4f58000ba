"""What is used is what is checked: every element, every format, every layout."""

import math

import mxnet as mx
import numpy as np
import pytest
from helpers.mxnet import (
    INF,
    NAN,
    TWO,
    Spoil,
    parameters,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, gluon, nd

import gradlift.mxnet as gl
from gradlift import Cause
from gradlift.mxnet import finite_check
from gradlift.mxnet.finite_check import Gradient, by_numpy, by_ops, look


def test_what_is_used_is_checked():
    """Finite as it stands, infinite when it has been rescaled."""
    trainer = sgd(parameters(), rescale_grad=2.0**127)
    scaler = gl.init_trainer(trainer, "static:1")
    before = weights(trainer)
    step(gl, trainer, 4.0)
    assert scaler.result.cause is Cause.OVERFLOW
    assert same(weights(trainer), before)


def test_float16_arithmetic_elementwise():
    """float32 weights, multiplied in float16: gradients vanish unless they are scaled."""
    found = {}
    for rule in ("off", "dynamic"):
        (w, _) = params = parameters()
        trainer = sgd(params[:1], learning_rate=1.0)
        gl.init_trainer(trainer, rule)
        w.set_data(nd.zeros(3))
        before = w.data().asnumpy()
        x = nd.array([2.0**-14, 2.0**-13, 2.0**-12], dtype="float16")
        with autograd.record():
            out = (w.data().astype("float16") * x).astype("float32") * 2.0**-14
            with gl.scale_loss(out, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        found[rule] = w.grad().asnumpy()
        assert same([w.data().asnumpy()], [before]) == (rule == "off")
    assert (found["off"] == 0).all()
    assert (found["dynamic"] == np.float32([2.0**-12, 2.0**-11, 2.0**-10])).all()


@pytest.mark.parametrize("by_hand", [False, True])
def test_sparse_gradients(by_hand):
    found = []
    for rule in ("off", "dynamic"):
        mx.random.seed(1)
        p = gluon.Parameter("table", shape=(6, 2), grad_stype="row_sparse")
        p.initialize(mx.init.Uniform(1.0))
        trainer = sgd([p])
        scaler = gl.init_trainer(trainer, rule)
        for rows, spoil in (([1, 4], 1.0), ([2], INF if rule == "dynamic" else None), ([5, 5], 1)):
            if spoil is None:
                continue
            with autograd.record():
                out = nd.Embedding(nd.array(rows), p.data(), 6, 2, sparse_grad=True)
                out = out if spoil == 1 else Spoil(spoil)(out)
                with gl.scale_loss((out * out).sum(), trainer) as scaled:
                    scaled.backward()
            if by_hand:
                gl.unscale(trainer)
            trainer.step(1)
        found.append(p.data().asnumpy())
    assert same(found[:1], found[1:])
    assert scaler.skipped_steps == 1


# The look at them
def arrays():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float16", "float64"):
        for shape in ((1,), (8192,), (8193,), (3, 5, 7), (2**18 + 5,)):
            yield nd.array(rng.standard_normal(shape), dtype=dtype)
    yield nd.zeros(5)
    yield nd.array([1e30, -2e30])  # squares leave float32, values do not
    yield nd.array([2.0**-100, 0])  # squares vanish
    yield nd.array([300, -400], dtype="float16")  # squares leave float16


def test_both_looks_are_right():
    """NumPy's for a CPU, MXNet's ops for an accelerator (run on a CPU here)."""
    given = list(arrays())
    exact = [a.asnumpy().astype(np.float64) for a in given]
    for sizes in ([by_numpy(a, True) for a in given], by_ops(given, True)):
        for size, a in zip(sizes, exact, strict=True):
            assert size.squares == pytest.approx((a * a).sum(), rel=2e-5)
            assert size.peak == pytest.approx(np.abs(a).max(), rel=1e-7)  # float64 is rounded
    for size in by_ops(given, False):
        assert math.isnan(size.peak)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("place", [0, 9000])
def test_both_looks_find_one_element(bad, dtype, place):
    a = np.ones(10_000)
    a[place] = bad
    spoiled, sound = nd.array(a, dtype=dtype), nd.ones(3, dtype=dtype)
    for one, two in ((by_numpy(spoiled, True), by_numpy(sound, True)), by_ops([spoiled, sound], 1)):
        assert not math.isfinite(one.squares)
        assert two.squares == 3


def test_the_norm_of_a_large_gradient():
    a = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    exact = np.linalg.norm(a.astype(np.float64))
    for sizes in ([by_numpy(nd.array(a), False)], by_ops([nd.array(a)], False)):
        assert math.sqrt(sizes[0].squares) == pytest.approx(exact, rel=1e-5)
    assert abs(nd.norm(nd.array(a)).asscalar() / exact - 1) > 1e-4  # MXNet's own


def test_amax_is_of_the_finite_elements():
    seen = look(
        [
            Gradient("a", nd.ones(1), nd.array([1, -8, NAN])),
            Gradient("b", nd.ones(1), nd.array([2, INF])),
            Gradient("c", nd.ones(1), nd.array([4.0])),
        ],
        1.0,
        amax=True,
    )
    assert seen.reading[:2] == (True, 8.0)
    assert [c.described for c in seen.culprits] == ["b (inf)", "a (nan)"]


def test_training_is_the_same_with_the_accelerators_look(monkeypatch):
    found = []
    for sizes in (None, by_ops):
        if sizes is not None:
            monkeypatch.setattr(finite_check, "_sizes", sizes)
        trainer = sgd(parameters(TWO, dtypes=("float16", "float32")), multi_precision=True)
        scaler = gl.init_trainer(trainer, "auto")
        for i in range(40):
            step(gl, trainer, 2.0 ** -(i % 7), INF if i % 11 == 5 else 1.0)
        found.append((weights(trainer), scaler.state_dict()))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1]["gradlift"]["skipped"] >= 3

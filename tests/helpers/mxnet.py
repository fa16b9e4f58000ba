"""Small Gluon trainers for the tests, and overflow on demand."""

import math
import subprocess
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import gradlift.mxnet as gl


class Spoil(autograd.Function):
    """Nothing on the way forward, `factor` on the way back: inf is an overflow, NaN is worse."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.copy()

    def backward(self, dy):
        return dy * self.factor


ONE = (mx.cpu(0),)
TWO = (mx.cpu(0), mx.cpu(1))
HALF = ("float16", "float16")


def parameters(devices=ONE, dtypes=("float32", "float32"), **settings):
    """w (3) and b (2, 2), started from a fixed seed."""
    mx.random.seed(0)
    params = [
        gluon.Parameter(n, shape=shape, dtype=dtype, **settings)
        for n, shape, dtype in zip(("w", "b"), (3, (2, 2)), dtypes, strict=True)
    ]
    for p in params:
        p.initialize(mx.init.Uniform(1.0), ctx=list(devices))
    return params


def sgd(params, learning_rate=0.5, kvstore="device", update_on_kvstore=None, **settings):
    given = {"learning_rate": learning_rate, **settings}
    return gluon.Trainer(params, "sgd", given, kvstore=kvstore, update_on_kvstore=update_on_kvstore)


def losses(params, x, spoil=1.0):
    """One loss a device, in float32: the sum of x * w^2 / 2 over all weights. Call it in `record`.

    `spoil` is a factor for each device, or one for all, that the gradients are multiplied by.
    """
    devices = params[0].list_ctx()
    spoils = spoil if isinstance(spoil, list) else [spoil] * len(devices)
    found = []
    for device, factor in zip(devices, spoils, strict=True):
        terms = []
        for p in params:
            w = p.data(device)
            w = w if w.dtype == np.float32 else w.astype("float32")  # ignores grad_req="add"
            w = w if factor == 1 else Spoil(factor)(w)
            terms.append((w * w * (x / 2)).sum())
        found.append(sum(terms[1:], terms[0]))
    return found


def step(module, trainer, x=1.0, spoil=1.0, batch_size=1):
    """scale_loss, backward, step: written against `mxnet.contrib.amp` or `gradlift.mxnet`."""
    with autograd.record(), module.scale_loss(losses(trainer._params, x, spoil), trainer) as scaled:
        autograd.backward(scaled)
    trainer.step(batch_size)


def backward(trainer, x=1.0, spoil=1.0):
    """A micro-batch: scale_loss and backward, no step."""
    with autograd.record(), gl.scale_loss(losses(trainer._params, x, spoil), trainer) as scaled:
        autograd.backward(scaled)


def plain_step(trainer, x=1.0, batch_size=1):
    """The same step without a scale."""
    with autograd.record():
        found = losses(trainer._params, x)
    autograd.backward(found)
    trainer.step(batch_size)


def run(code, *arguments):
    """What a script prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(trainer):
    return [w.asnumpy() for p in trainer._params for w in p.list_data()]


def same(found, expected):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


def finite(arrays):
    return all(np.isfinite(a).all() for a in arrays)


INF, NAN = math.inf, math.nan

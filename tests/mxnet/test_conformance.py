"""gradlift.mxnet against the suite that every adapter passes, in the ways Gluon is used."""

import mxnet as mx
import numpy as np
import pytest
from conformance.suite import *  # noqa: F403
from mxnet import autograd, gluon, nd

from gradlift.mxnet import init_trainer, scale_loss, unscale
from gradlift.rules import parse


class Given(autograd.Function):
    """A loss and its gradients, as told."""

    def __init__(self, loss, grads):
        super().__init__()
        self.loss, self.grads = loss, grads

    def forward(self, *weights):
        return nd.array([self.loss], ctx=weights[0].context)

    def backward(self, scale):
        return tuple(nd.array(g, ctx=scale.context) * scale for g in self.grads)


class OneDevice:
    """float32 weights that are used in float16."""

    devices = [mx.cpu(0)]
    kvstore = "device"
    dtype = "float32"
    optimizer = {"learning_rate": 1.0}

    def __init__(self, rule, **limits):
        self.params = {n: gluon.Parameter(n, shape=k, dtype=self.dtype) for n, k in SHAPES}
        for p in self.params.values():
            p.initialize(mx.init.One(), ctx=self.devices)
        self.trainer = gluon.Trainer(
            list(self.params.values()), "sgd", dict(self.optimizer), kvstore=self.kvstore
        )
        self.scaler = init_trainer(self.trainer, parse(rule), **limits)

    def step(self, loss, grads):
        with autograd.record():
            losses = [self.loss(loss, grads, device) for device in self.devices]
            with scale_loss(losses, self.trainer) as scaled:
                if grads:
                    autograd.backward(scaled)
        self.finish()
        result = self.scaler.result
        return result.stepped, result.cause, self.scaler.get_scale(), self.weights()

    def loss(self, loss, grads, device):
        if not grads:
            return nd.array([loss], ctx=device)
        weights = [self.params[n].data(device) for n in grads]
        halves = [w.astype("float16").astype("float32") for w in weights]
        return Given(loss, list(grads.values()))(*halves)

    def finish(self):
        self.trainer.step(1, ignore_stale_grad=True)

    def weights(self):
        return {n: p.data(self.devices[-1]).asnumpy() for n, p in self.params.items()}


class Unscaled(OneDevice):
    """`unscale` is called before the step."""

    def finish(self):
        unscale(self.trainer)
        super().finish()


class HalfWeights(OneDevice):
    """float16 weights, whose float32 masters MXNet keeps."""

    dtype = "float16"
    optimizer = {"learning_rate": 1.0, "multi_precision": True}

    def loss(self, loss, grads, device):
        if not grads:
            return nd.array([loss], ctx=device)
        weights = [self.params[n].data(device).astype("float32") for n in grads]
        return Given(loss, list(grads.values()))(*weights)

    def weights(self):
        held = self.trainer._updaters[0].states
        masters = {n: held[i][1] for i, n in enumerate(self.params) if i in held}
        return {n: masters.get(n, p.data()).asnumpy().astype("f4") for n, p in self.params.items()}


class TwoDevices(OneDevice):
    """The gradients come from the second of two devices, the first gives zeros."""

    devices = [mx.cpu(0), mx.cpu(1)]

    def loss(self, loss, grads, device):
        if device != self.devices[-1]:
            loss, grads = 1.0, {n: np.zeros_like(g) for n, g in grads.items()}
        return super().loss(loss, grads, device)


class TwoDevicesApart(TwoDevices):
    """The same, and nobody adds gradients up."""

    kvstore = None


class TwoDevicesUnscaled(TwoDevices):
    """What MXNet recommends for clipping on several devices."""

    def finish(self):
        self.trainer.allreduce_grads()
        unscale(self.trainer)
        self.trainer.update(1, ignore_stale_grad=True)


SHAPES = (("a", 4), ("b", 2))
DRIVERS = [OneDevice, Unscaled, HalfWeights, TwoDevices, TwoDevicesApart, TwoDevicesUnscaled]


@pytest.fixture(params=DRIVERS, ids=lambda d: d.__name__)
def Driver(request):
    return request.param

"""gradlift.mxnet against the suites that every adapter passes, in the ways Gluon is used."""

import mxnet as mx
import numpy as np
import pytest
from conformance.records import *  # noqa: F403
from conformance.suite import *  # noqa: F403
from mxnet import autograd, gluon, nd

from gradlift import Journal
from gradlift.mxnet import init_trainer, scale_loss, unscale


class Given(autograd.Function):
    """A loss and its gradients, as given."""

    def __init__(self, loss, grads, dtype):
        super().__init__()
        self.loss, self.grads, self.dtype = loss, grads, dtype

    def forward(self, *weights):
        return nd.array([self.loss], ctx=weights[0].context, dtype=self.dtype)

    def backward(self, scale):
        scale = scale.astype("float32")
        return tuple(nd.array(g, ctx=scale.context) * scale for g in self.grads)


class OneDevice:
    """float32 weights that are used in float16."""

    adapter = framework = "mxnet"
    CANNOT = {
        "retries": "trainer.step sees one backward pass, not the batch",
    }
    devices = [mx.cpu(0)]
    kvstore = "device"
    dtype = "float32"
    optimizer = {"learning_rate": 1.0}

    def __init__(self, rule, journal=None, **limits):
        self.params = {n: gluon.Parameter(n, shape=k, dtype=self.dtype) for n, k in SHAPES}
        for p in self.params.values():
            p.initialize(mx.init.One(), ctx=self.devices)
        self.trainer = gluon.Trainer(
            list(self.params.values()), "sgd", dict(self.optimizer), kvstore=self.kvstore
        )
        self.journal = None if journal is None else Journal(journal)
        self.scaler = init_trainer(self.trainer, rule, journal=self.journal, **limits)

    def step(self, loss, grads):
        return self.window([(loss, grads)])

    def half(self, loss, grads):
        return self.window([(loss, grads)], "float16")

    def window(self, batches, dtype="float32"):
        for p in self.params.values():
            p.grad_req = "write" if len(batches) == 1 else "add"
        for loss, grads in batches:
            with autograd.record():
                losses = [self.loss(loss, grads, device, dtype) for device in self.devices]
                with scale_loss(losses, self.trainer) as scaled:
                    if grads:
                        autograd.backward(scaled)
        self.finish()
        if len(batches) > 1:
            for p in self.params.values():
                p.zero_grad()
        result = self.scaler.result
        return result.stepped, result.cause, self.scaler.get_scale(), self.weights()

    @property
    def result(self):
        return self.scaler.result

    @property
    def skipped_steps(self):
        return self.scaler.skipped_steps

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, data):
        self.scaler.load_state_dict(data)

    def close(self):
        if self.journal is not None:
            self.journal.close()

    def loss(self, loss, grads, device, dtype):
        if not grads:
            return nd.array([loss], ctx=device, dtype=dtype)
        used = [self.used(self.params[n].data(device)) for n in grads]
        return Given(loss, list(grads.values()), dtype)(*used)

    def used(self, weight):
        """As a layer uses it; a cast by itself ignores grad_req="add"."""
        return (weight * 1).astype("float16").astype("float32")

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

    def used(self, weight):
        return (weight * 1).astype("float32")

    def weights(self):
        held = self.trainer._updaters[0].states
        masters = {n: held[i][1] for i, n in enumerate(self.params) if i in held}
        return {n: masters.get(n, p.data()).asnumpy().astype("f4") for n, p in self.params.items()}


class TwoDevices(OneDevice):
    """The gradients come from the second of two devices, the first gives zeros."""

    devices = [mx.cpu(0), mx.cpu(1)]

    def loss(self, loss, grads, device, dtype):
        if device != self.devices[-1]:
            loss, grads = 0.0, {n: np.zeros_like(g) for n, g in grads.items()}
        return super().loss(loss, grads, device, dtype)


class TwoDevicesApart(OneDevice):
    """Both devices give all gradients, which nobody adds up."""

    devices = [mx.cpu(0), mx.cpu(1)]
    kvstore = None

    def loss(self, loss, grads, device, dtype):
        return super().loss(loss if device == self.devices[-1] else 0.0, grads, device, dtype)


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

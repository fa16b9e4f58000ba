"""GradScaler against the suites that every adapter passes, in numbers and on the device path."""

import pytest
import torch
from conformance.records import *  # noqa: F403
from conformance.suite import *  # noqa: F403

from gradlift import Journal
from gradlift.torch import GradScaler, MasterWeights


class Given(torch.autograd.Function):
    """A loss and its gradients as given, with a backward pass in float16."""

    @staticmethod
    def forward(ctx, a, b, loss, grads):
        ctx.grads, ctx.dtype = grads, a.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        halves = [(torch.from_numpy(ctx.grads[n]) * upstream).half() for n in ("a", "b")]
        return *(g.to(ctx.dtype) for g in halves), None, None


class TorchDriver:
    adapter = framework = "torch"
    CANNOT = {}
    device_path = fused = False
    dtype = torch.float32

    def __init__(self, rule, journal=None, **limits):
        self.journal = Journal(journal) if journal else None
        self.a = torch.nn.Parameter(torch.ones(4, dtype=self.dtype))
        self.b = torch.nn.Parameter(torch.ones(2, dtype=self.dtype))
        names = {"a": self.a, "b": self.b}
        self.scaler = GradScaler("cpu", rule=rule, journal=self.journal, names=names, **limits)
        self.scaler._force_device_path = self.device_path
        self.optimizer = self.made()

    def made(self):
        return torch.optim.SGD([self.a, self.b], lr=1.0, fused=self.fused)

    def step(self, loss, grads):
        return self.window([(loss, grads)])

    def half(self, loss, grads):
        return self.window([(loss, grads)], torch.float16)

    def window(self, batches, dtype=torch.float32):
        self.optimizer.zero_grad()
        for loss, grads in batches:
            scaled = self.scaler.scale(self.loss(loss, grads, dtype))
            if grads:
                scaled.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.outcome()

    def train(self, batches, retries):
        for batch in batches:
            closure = lambda batch=batch: self.loss(*batch)
            self.scaler.train_step(closure, self.optimizer, retries=retries, model=False)
        return self.outcome()

    def loss(self, loss, grads, dtype=torch.float32):
        return Given.apply(self.a, self.b, torch.tensor(loss, dtype=dtype), grads)

    def outcome(self):
        result = self.scaler.result
        params = dict(zip("ab", (w.detach().numpy() for w in self.weights())))
        return result.stepped, result.cause, self.scaler.get_scale(), params

    def weights(self):
        return [self.a, self.b]

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
        self.scaler.flush()
        if self.journal is not None:
            self.journal.close()


class FusedDriver(TorchDriver):
    adapter = "torch, fused"
    fused = True


class MastersDriver(TorchDriver):
    """float16 parameters."""

    adapter = "torch, masters"
    dtype = torch.float16

    def made(self):
        return MasterWeights(torch.optim.SGD, [self.a, self.b], lr=1.0)

    def weights(self):
        return self.optimizer.masters


class DeviceDriver(TorchDriver):
    adapter = "torch on a device"
    device_path = True


class FusedDeviceDriver(TorchDriver):
    adapter = "torch on a device, fused"
    device_path = fused = True
    late = 1
    CANNOT = {"at once": "the kernel decides, and its numbers are read at the next step"}


class MastersDeviceDriver(MastersDriver):
    adapter = "torch on a device, masters"
    device_path = True
    late = 1
    CANNOT = {"at once": "masters take found_inf like a kernel, and are read at the next step"}


DRIVERS = [
    TorchDriver,
    FusedDriver,
    MastersDriver,
    DeviceDriver,
    FusedDeviceDriver,
    MastersDeviceDriver,
]


@pytest.fixture(params=DRIVERS, ids=lambda d: d.__name__)
def Driver(request):
    return request.param

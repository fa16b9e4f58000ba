"""GradScaler against the suite that every adapter passes, in numbers and on the device path."""

import pytest
import torch
from conformance.suite import *  # noqa: F403

from gradlift.rules import parse
from gradlift.torch import GradScaler


class Given(torch.autograd.Function):
    """A loss and its gradients as told, with a backward pass in float16."""

    @staticmethod
    def forward(ctx, a, b, loss, grads):
        ctx.grads = grads
        return a.new_tensor(loss)

    @staticmethod
    def backward(ctx, upstream):
        halves = [(torch.from_numpy(ctx.grads[n]) * upstream).half().float() for n in ("a", "b")]
        return *halves, None, None


class TorchDriver:
    device_path = False
    fused = False

    def __init__(self, rule, **limits):
        self.scaler = GradScaler("cpu", rule=parse(rule), **limits)  # "auto" as it is
        self.scaler._force_device_path = self.device_path
        self.a = torch.nn.Parameter(torch.ones(4))
        self.b = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.a, self.b], lr=1.0, fused=self.fused)

    def step(self, loss, grads):
        self.optimizer.zero_grad()
        given = Given.apply(self.a, self.b, loss, grads)
        scaled = self.scaler.scale(given)
        if grads:
            scaled.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        result = self.scaler.result
        params = {"a": self.a.detach().numpy(), "b": self.b.detach().numpy()}
        return result.stepped, result.cause, self.scaler.get_scale(), params


class FusedDriver(TorchDriver):
    fused = True


class DeviceDriver(TorchDriver):
    device_path = True


class FusedDeviceDriver(TorchDriver):
    device_path = fused = True
    late = 1


@pytest.fixture(params=[TorchDriver, FusedDriver, DeviceDriver, FusedDeviceDriver])
def Driver(request):
    return request.param

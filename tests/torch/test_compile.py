"""torch.compile around a step, or a loop, that has a scaler in it."""

import math

import pytest
import torch
from helpers.torch import bits

from gradlift.torch import GradScaler

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the compiler's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(kind, how, backend=None, *, device_path=False, fused=False):
    """Weights, scale and whether anything was skipped, after steps of which one overflows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=fused)
    scaler = kind("cpu", init_scale=2.0**8, growth_interval=2)
    if device_path:
        scaler._force_device_path = True
    batches = [torch.randn(4, 5) for _ in range(6)]
    batches[3][0, 0] = math.inf

    def one(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss

    def loop(batches):
        for x in batches:
            one(x)

    if how == "model" and backend:
        model.compile(backend=backend)
    if how == "step" and backend:
        one = torch.compile(one, backend=backend)
    if how == "loop" and backend:
        loop = torch.compile(loop, backend=backend)
    loop(batches)
    return weights, scaler.get_scale()


@pytest.mark.parametrize("device_path", [False, True], ids=["", "device path"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("how", ["model", "step", "loop"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_weights_are_those_of_the_uncompiled_loop(backend, how, fused, device_path):
    plain, scale = trained(torch.amp.GradScaler, "loop", fused=fused)
    weights, after = trained(GradScaler, how, backend, fused=fused, device_path=device_path)
    assert scale == after == 2.0**9  # doubled, halved by the fourth batch, doubled
    assert [bits(p) for p in weights] == [bits(p) for p in plain]


@pytest.mark.parametrize("how", ["model", "step"])
def test_inductor(how):
    plain, _ = trained(torch.amp.GradScaler, "loop")
    weights, _ = trained(GradScaler, how, "inductor")
    for p, q in zip(weights, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_what_a_step_came_to_can_be_asked_inside():
    w = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([w], lr=0.5), GradScaler("cpu")

    @torch.compile(backend="eager")
    def one(x):
        result = scaler.train_step(lambda: (w * x).sum(), optimizer, max_norm=1.0)
        return result.stepped, scaler.result.scale, scaler.get_scale()

    assert one(torch.ones(2)) == (True, 2.0**16, 2.0**16)

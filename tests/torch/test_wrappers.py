"""Wrappers around a scaler as public training code has them: equal weights beside torch's."""

import math

import pytest
import torch
from helpers.torch import bits

from gradlift.torch import GradScaler


def of_torch():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def of_gradlift():
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


def loss_of(net, i):
    """Through float16 activations; the fifth overflows in the backward pass."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
    with torch.autocast("cpu", torch.float16):
        out = net(x)
    return out.float().square().mean() * (1e30 if i == 4 else 1.0)


def flattened(net):
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def call_with_clip_and_norm(net, make, clip=None, mode="norm", every=1):
    """timm, MAE, ConvNeXt, Swin: an object that is called with the loss, and returns the norm."""

    class Wrapper:
        state_dict_key = "amp_scaler"

        def __init__(self):
            self._scaler = make()

        def __call__(self, loss, optimizer, parameters, need_update=True, create_graph=False):
            self._scaler.scale(loss).backward(create_graph=create_graph)
            if not need_update:
                return None
            parameters = list(parameters)
            norm = None
            self._scaler.unscale_(optimizer)
            if clip is None:
                norm = torch.linalg.vector_norm(
                    torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters])
                )
            elif mode == "norm":
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            else:
                torch.nn.utils.clip_grad_value_(parameters, clip)
            self._scaler.step(optimizer)
            self._scaler.update()
            return norm

        def state_dict(self):
            return self._scaler.state_dict()

        def load_state_dict(self, state):
            self._scaler.load_state_dict(state)

    optimizer, wrapper, norms = torch.optim.AdamW(net.parameters(), lr=0.01), Wrapper(), []
    for i in range(12):
        last = (i + 1) % every == 0
        norm = wrapper(loss_of(net, i) / every, optimizer, net.parameters(), need_update=last)
        norms.append(str(None if norm is None else norm.item()))
        if last:
            optimizer.zero_grad()
        if i == 7:  # saved and loaded in mid-run
            saved, wrapper = wrapper.state_dict(), Wrapper()
            wrapper.load_state_dict(saved)
    return norms, wrapper._scaler.get_scale()


def trainer_with_hooks(net, make):
    """detectron2: the loss is a sum of a dict, `grad_scaler` lives on the trainer, zero_grad comes
    first, and the scale is written beside the metrics."""
    optimizer, scaler, seen = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), make(), []
    for i in range(10):
        losses = {"first": loss_of(net, i), "second": loss_of(net, i + 100) * 0.5}
        optimizer.zero_grad()
        scaler.scale(sum(losses.values())).backward()
        seen.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    return seen, scaler.state_dict()["scale"]


def accumulate_and_warm_up(net, make):
    """YOLO: the number of accumulated batches and the rates rise during the warm-up; clipping by
    hand; an average of the weights after every step."""
    groups = [{"params": [p]} for p in net.parameters()]
    optimizer, scaler = torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True), make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 10)
    average = {k: v.clone() for k, v in net.state_dict().items()}
    last, accumulate, scales = -1, 1, []
    optimizer.zero_grad()
    for epoch in range(3):
        for i in range(6):
            n = i + 6 * epoch
            if n <= 8:
                accumulate = max(1, round(1 + 3 * n / 8))
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 * n / 8
            scaler.scale(loss_of(net, n)).backward()
            if n - last >= accumulate:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
                for k, v in net.state_dict().items():
                    if v.is_floating_point():
                        average[k].mul_(0.9).add_(v, alpha=0.1)
                last = n
        schedule.step()
    return scales, bits(average)


def two_networks_one_trainer(net, make):
    """lucidrains' trainers: several micro-batches for the discriminator, its step, then several for
    the generator, its step; one scaler each, clipped by hand."""
    other = Net()
    opts = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.9, 0.99)) for m in (net, other)]
    scalers, norms = [make(), make()], []
    for i in range(5):
        for which, (model, optimizer, scaler) in enumerate(zip((net, other), opts, scalers)):
            for n in range(3):
                scaler.scale(loss_of(model, 3 * i + n + which) / 3).backward()
            scaler.unscale_(optimizer)
            norms.append(str(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norms, [s.get_scale() for s in scalers], bits(other)


def clipped_at_a_scaled_bound(net, make):
    """fairscale's and fairseq's way: gradients stay scaled, the bound is multiplied by the scale;
    a step that was skipped is known by the scale having become smaller."""
    optimizer, scaler, told = torch.optim.Adam(net.parameters(), lr=0.01), make(), []
    for i in range(10):
        optimizer.zero_grad()
        before = scaler.get_scale()
        scaler.scale(loss_of(net, i)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5 * before)
        scaler.step(optimizer)
        scaler.update()
        told.append((before, scaler.get_scale() < before))
    return told


def step_is_patched_to_see_a_skip(net, make):
    """Accelerate: `optimizer.step` is exchanged for one that notes that it was called."""
    optimizer, scaler, skipped = torch.optim.AdamW(net.parameters(), lr=0.01), make(), []
    original, called = optimizer.step, []

    def patched(*args, **kwargs):
        called.append(True)
        return original(*args, **kwargs)

    for i in range(10):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, i)).backward()
        called.clear()
        optimizer.step = patched
        scaler.step(optimizer)
        optimizer.step = original
        scaler.update()
        skipped.append(not called)
    assert True in skipped
    return skipped


def skipped_by_hand_if_the_norm_is_bad(net, make):
    """torchtune, whisper's and stable-diffusion's trainers: the norm after unscale_ decides, and
    a step that is left out is followed by update() all the same."""
    optimizer, scaler, told = torch.optim.AdamW(net.parameters(), lr=0.01), make(), []
    for i in range(10):
        scaler.scale(loss_of(net, i)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if math.isfinite(norm):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        told.append((str(norm.item()), scaler.get_scale()))
    return told


PATTERNS = {
    "called, no clip": call_with_clip_and_norm,
    "called, clipped": lambda net, make: call_with_clip_and_norm(net, make, 0.5),
    "called, clipped by value": lambda net, make: call_with_clip_and_norm(net, make, 0.1, "value"),
    "called, accumulated": lambda net, make: call_with_clip_and_norm(net, make, 0.5, every=3),
    "trainer with hooks": trainer_with_hooks,
    "accumulate and warm up": accumulate_and_warm_up,
    "two networks": two_networks_one_trainer,
    "scaled bound": clipped_at_a_scaled_bound,
    "patched step": step_is_patched_to_see_a_skip,
    "skipped by hand": skipped_by_hand_if_the_norm_is_bad,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_public_wrapper_trains_to_the_same_bits(pattern):
    told, scalers = [], []

    def ours():
        scalers.append(of_gradlift())
        return scalers[-1]

    for make in (of_torch, ours):
        net = Net()
        untrained = bits(net)
        said = PATTERNS[pattern](net, make)
        assert bits(net) != untrained
        told.append((said, bits(net), bits(dict(net.named_buffers()))))
    assert told[0] == told[1]
    assert sum(s.skipped_steps for s in scalers) > 0  # else little is shown

"""What belongs to one step: micro-batches, several losses, several optimizers."""

import json
import math

import pytest
import torch
from helpers.torch import bits, both_paths, exploding, good, made, nan_loss, net, step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradlift import Cause
from gradlift.torch import GradScaler


def test_an_optimizer_without_gradients_every_second_step():
    a, b = net(8, 1), net(8, 1, seed=1)
    opt_a = torch.optim.SGD(a.parameters(), lr=0.1)
    opt_b = torch.optim.SGD(b.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=4)
    for i in range(8):
        for model, optimizer in ((a, opt_a), (b, opt_b)):
            optimizer.zero_grad()
            if model is a or i % 2 == 0:
                scaler.scale(good(model)).backward()
            scaler.step(optimizer)
        if i % 2:
            assert scaler.result.cause is Cause.NO_GRADIENTS
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert scaler.skipped_steps == 0


def test_a_window_with_no_gradients_at_all_changes_nothing():
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", growth_interval=1)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 2.0**16
    scaler.update()  # nothing was stepped since: nothing to do
    assert scaler.result.cause is Cause.NO_GRADIENTS


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_four_micro_batches_one_inf_while_growth_falls_due(bad):
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for window in range(2):
        before = bits(model)
        optimizer.zero_grad()
        for i in range(4):
            loss = good(model) / 4
            if window == 1 and i == bad:
                loss = exploding(model)
            scaler.scale(loss).backward()
            assert scaler.get_scale() == 2.0**8  # frozen inside the window
        scaler.step(optimizer)
        result = scaler.result
        scaler.update()
        assert result.stepped == (window == 0)
    assert result.micro_batch is None  # its loss was finite, and gradients arrive as one sum
    assert before == bits(model)
    assert scaler.get_scale() == 2.0**7


@pytest.mark.parametrize("skip", ["each", "all"])
def test_two_networks_with_inf_in_one(skip):
    a, b = net(8, 1), net(8, 1, seed=1)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    scaler = GradScaler("cpu", init_scale=2.0**8, skip=skip)
    before_a, before_b = bits(a), bits(b)
    scaler.scale(good(a)).backward()
    scaler.scale(exploding(b)).backward()
    for optimizer in opts:
        scaler.step(optimizer)
    scaler.update()
    assert before_b == bits(b)
    assert (before_a == bits(a)) == (skip == "all")
    assert scaler.get_scale() == 2.0**7
    assert scaler.skipped_steps == 1
    for m, optimizer in zip((a, b), opts):
        optimizer.zero_grad()
        scaler.scale(good(m)).backward()
    for optimizer in opts:
        scaler.step(optimizer)
    scaler.update()
    assert before_a != bits(a)
    assert before_b != bits(b)


def test_the_skip_of_one_of_two_optimizers_is_recorded_whichever_is_first():
    for bad in (0, 1):
        nets = net(8, 1), net(8, 1, seed=1)
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in nets]
        scaler = GradScaler("cpu", init_scale=2.0**8)
        for i, m in enumerate(nets):
            scaler.scale(exploding(m) if i == bad else good(m)).backward()
        for optimizer in opts:
            scaler.step(optimizer)
        scaler.update()
        assert [e.what for e in scaler.events] == ["skip"]


def test_one_scale_a_loss():
    g, d = net(8, 1), net(8, 1, seed=1)
    opt_g = torch.optim.SGD(g.parameters(), lr=0.1)
    opt_d = torch.optim.SGD(d.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(good(g), key="g").backward()
    scaler.scale(exploding(d), key="d").backward()
    scaler.step(opt_g, key="g")
    assert scaler.result.stepped
    scaler.step(opt_d, key="d")
    assert not scaler.result.stepped
    scaler.update()
    assert (scaler.get_scale("g"), scaler.get_scale("d")) == (2.0**8, 2.0**7)
    other = GradScaler("cpu")
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert (other.get_scale("g"), other.get_scale("d"), other.get_scale()) == (2**8, 2**7, 2**8)
    assert other.events[0].detail["key"] == "d"


def test_gradients_assigned_by_hand_count():
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=4.0)
    w.grad = torch.tensor([2.0])
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    assert w.item() == 0.5
    scaler.update()
    w.grad = torch.tensor([math.inf])
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    assert (scaler.result.stepped, scaler.result.cause) == (False, Cause.UNKNOWN_NONFINITE)


# Accumulation


class Touched(TorchDispatchMode):
    """Counts operations, and those that are given one of these tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.watched = {t.data_ptr() for t in tensors}
        self.ops, self.touched = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.ops.append(str(func))
        if any(t.data_ptr() in self.watched for t in given):
            self.touched.append(str(func))
        return func(*args, **(kwargs or {}))


@both_paths
@pytest.mark.parametrize("settings", [{}, {"rule": "auto"}, {"journal": True}], ids=str)
def test_scaling_a_micro_batch_reads_no_gradient(device_path, settings, tmp_path):
    model = net(8, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "journal" in settings:
        settings = {"journal": tmp_path / "run.jsonl"}
    scaler = GradScaler("cpu", names=model, **settings)
    scaler._force_device_path = device_path
    counts = []
    for _ in range(3):
        for _ in range(3):
            loss = good(model)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            with Touched(grads) as seen:
                scaled = scaler.scale(loss)
            assert seen.touched == []
            counts.append(len(seen.ops))
            scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert len(set(counts[1:])) <= 2, counts
    assert max(counts[1:]) < 20, counts
    with Touched([p.grad for p in model.parameters()]) as seen:  # the look itself would be seen
        scaler.scale(good(model)).backward()
        scaler.step(optimizer)
    assert seen.touched


@both_paths
@pytest.mark.parametrize("first", ["scaled", "unscaled"])
def test_the_micro_batch_whose_loss_was_not_finite_is_named_and_no_other(device_path, first):
    """Gradients arrive as one sum: what is read between micro-batches would be read in vain."""
    for bad, named in ((nan_loss, 1), (exploding, None)):
        model = net(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**8)
        scaler._force_device_path = device_path
        for loss in (good, bad, good):
            scaler.scale(loss(model)).backward()
        if first == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        result = scaler.result
        scaler.update()
        assert result.skipped
        assert result.micro_batch == named


def test_drop_bad_keeps_the_clean_micro_batches():
    plain, dropped = net(8, 1), net(8, 1)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, dropped)]
    scaler = GradScaler("cpu", init_scale=2.0**8)
    with scaler.accumulate(drop_bad=True) as window:
        for loss in (good, exploding, good, nan_loss):
            scaler.scale(loss(dropped)).backward()
    assert (window.kept, window.dropped) == ([0, 2], [1, 3])
    scaler.step(opts[1])
    assert scaler.result.stepped
    assert "left out: [1, 3]" in str(scaler.result)
    scaler.update()
    assert scaler.get_scale() == 2.0**7  # the overflow was left out, but it did happen
    other = GradScaler("cpu", init_scale=2.0**8)
    for _ in range(2):
        other.scale(good(plain)).backward()
    other.step(opts[0])
    assert bits(plain) == bits(dropped)


@pytest.mark.parametrize(
    ("loss", "cause"), [(exploding, Cause.OVERFLOW), (nan_loss, Cause.LOSS_NONFINITE)]
)
def test_drop_bad_with_nothing_left(loss, cause):
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    with scaler.accumulate(drop_bad=True):
        scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    assert (scaler.result.stepped, scaler.result.cause) == (False, cause)
    scaler.update()
    assert scaler.get_scale() == (2.0**15 if cause is Cause.OVERFLOW else 2.0**16)


@both_paths
def test_a_non_finite_loss_skips_its_own_optimizer_only(device_path):
    a, opt_a, scaler = made(device_path)
    b = torch.nn.Parameter(torch.zeros(1))
    opt_b = torch.optim.SGD([b], lr=1.0)
    scaler.scale((a * math.nan).sum()).backward()
    scaler.scale((b * 2).sum()).backward()
    scaler.step(opt_a)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    scaler.step(opt_b)
    assert scaler.result.stepped
    scaler.update()
    assert (a.item(), b.item()) == (0.0, -2.0)
    assert scaler.get_scale() == 2.0**16


@both_paths
def test_a_batch_that_was_given_up_is_forgotten(device_path):
    w, optimizer, scaler = made(device_path)
    scaler.scale((w * math.nan).sum()).backward()
    step(w, optimizer, scaler)  # zero_grad, then a good batch
    assert scaler.result.stepped


@both_paths
def test_more_micro_batches_after_some_were_dropped(device_path):
    w, optimizer, scaler = made(device_path, init_scale=4.0)
    with scaler.accumulate(drop_bad=True) as window:
        for slope in (1.0, 3e38, math.nan):
            scaler.scale((w * slope).sum()).backward()
    assert window.dropped == [1, 2]
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    assert scaler.result.stepped
    scaler.update()
    assert (w.item(), scaler.get_scale(), scaler.skipped_steps) == (-3.0, 2.0, 0)
    assert scaler.consecutive_skips == 0


@both_paths
def test_a_skip_counts_although_a_micro_batch_was_dropped_before(device_path):
    w, optimizer, scaler = made(device_path, init_scale=4.0)
    with scaler.accumulate(drop_bad=True) as window:
        for slope in (1.0, 3e38):
            scaler.scale((w * slope).sum()).backward()
    assert window.dropped == [1]
    scaler.unscale_(optimizer)
    w.grad[0] = math.nan
    scaler.step(optimizer)
    assert scaler.result.skipped
    scaler.update()
    assert (w.item(), scaler.get_scale()) == (0.0, 2.0)
    assert (scaler.skipped_steps, scaler.consecutive_skips) == (1, 1)


@both_paths
@pytest.mark.parametrize("where", ["before accumulate", "inside"])
def test_drop_bad_knows_whose_loss_it_was(device_path, where):
    """A loss was scaled before the micro-batch whose loss is NaN: the scale is not to blame."""
    w, optimizer, scaler = made(device_path, init_scale=4.0)
    if where == "before accumulate":
        scaler.scale((w * 1.0).sum()).backward()
    with scaler.accumulate(drop_bad=True) as window:
        if where == "inside":
            scaler.scale(w.sum())  # no backward
        for slope in (math.nan, 2.0):
            scaler.scale((w * slope).sum()).backward()
    assert (window.dropped, window.kept) == ([0], [1])
    scaler.step(optimizer)
    assert scaler.result.stepped
    scaler.update()
    assert scaler.get_scale() == 4.0


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_drop_bad_with_nothing_left_but_zeros(device_path, fused):
    """Every loss was NaN, and `zero_grad(set_to_none=False)` left zeros."""
    w, optimizer, scaler = made(device_path, fused, init_scale=4.0)
    w.grad = torch.zeros_like(w)
    with scaler.accumulate(drop_bad=True):
        scaler.scale((w * math.nan).sum()).backward()
    scaler.step(optimizer)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    scaler.update()
    assert (w.item(), scaler.get_scale(), scaler.skipped_steps) == (0.0, 4.0, 1)


@both_paths
def test_two_losses_without_any_gradient(device_path):
    w, optimizer, scaler = made(device_path)
    for loss in (1.0, math.nan):
        scaler.scale(torch.tensor(loss))
    scaler.step(optimizer)
    assert scaler.result.cause is Cause.NO_GRADIENTS
    scaler.update()
    assert (w.item(), scaler.get_scale(), scaler.skipped_steps) == (0.0, 2.0**16, 0)


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_that_skip_together_step_without_what_was_dropped(device_path, fused):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for p in params]
    _, _, scaler = made(device_path, init_scale=4.0, skip="all")
    with scaler.accumulate(drop_bad=True) as window:
        for slope in (1.0, 3e38, 2.0):
            scaler.scale(sum(p * slope for p in params).sum()).backward()
    assert window.dropped == [1]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.result.stepped
    assert [p.item() for p in params] == [-3.0, -3.0]
    assert (scaler.get_scale(), scaler.skipped_steps) == (2.0, 0)

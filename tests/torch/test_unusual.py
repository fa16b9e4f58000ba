"""Unusual optimizers, gradients and calls: the step is right, or refused before it writes."""

import math
import os
import threading

import numpy as np
import pytest
import torch
from helpers.torch import both_paths
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlift import read_journal
from gradlift.errors import MisuseError, SettingsError
from gradlift.torch import GradScaler, MasterWeights

NAMES = [
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "ASGD", "Adafactor", "LBFGS"),
]
HOW = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True})


def parameter(n=3, value=1.0, dtype=torch.float32):
    return torch.nn.Parameter(torch.full((n,), value, dtype=dtype))


def scaler_of(device_path, **settings):
    scaler = GradScaler("cpu", init_scale=8.0, **settings)
    scaler._force_device_path = device_path
    return scaler


@both_paths
@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(how) or "default")
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_skips_and_goes_on(name, how, device_path):
    kind, p = getattr(torch.optim, name), parameter()
    try:
        optimizer = kind([p], lr=0.01, **how)
    except (TypeError, RuntimeError):  # has no such option
        assert how
        return
    scaler, told = scaler_of(device_path), []
    for factor in (1.0, math.nan, math.inf, 1.0):

        def closure(factor=factor):
            optimizer.zero_grad()
            loss = (p**2).sum() * factor
            scaler.scale(loss).backward()
            return loss

        if name == "LBFGS":
            scaler.step(optimizer, closure)
        else:
            closure()
            scaler.step(optimizer)
        scaler.update()
        told.append(scaler.result.stepped)
        assert p.isfinite().all()
    assert told == [True, False, False, True]


# Gradients


@both_paths
@pytest.mark.parametrize("shape", ["expanded", "overlapping", "one for two", "views", "transposed"])
def test_gradients_that_share_memory_are_unscaled_once(shape, device_path):
    p, q = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    full = torch.full((4, 2), 8.0)
    if shape == "expanded":
        p.grad, q.grad = torch.tensor(8.0).expand(4, 2), torch.full((2,), 8.0).expand(4, 2)
    elif shape == "overlapping":
        p.grad, q.grad = torch.full((5,), 8.0).as_strided((4, 2), (1, 1)), full
    elif shape == "one for two":
        p.grad = q.grad = full
    elif shape == "views":
        p.grad, q.grad = torch.full((16,), 8.0).view(2, 4, 2)
    else:
        p.grad, q.grad = torch.full((2, 4), 8.0).T, full
    optimizer, scaler = torch.optim.SGD([p, q], lr=1.0), scaler_of(device_path)
    scaler.get_scale()  # gradients scaled by hand
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not p.any()
    assert not q.any()


@both_paths
def test_a_base_that_is_written_to_is_seen_in_its_views(device_path):
    p, q, base = parameter(4), parameter(4), torch.full((8,), 8.0)
    p.grad, q.grad = base[:4], base[4:]
    optimizer, scaler = torch.optim.SGD([p, q], lr=1.0), scaler_of(device_path, names={"q": q})
    scaler.get_scale()  # gradients scaled by hand
    scaler.unscale_(optimizer)
    base[5] = math.nan
    scaler.step(optimizer)
    assert (scaler.result.stepped, list(scaler.result.culprits)) == (False, ["q"])


@both_paths
@pytest.mark.parametrize(("narrow", "wide"), [("bfloat16", "float32"), ("float32", "float64")])
def test_a_gradient_of_a_wider_dtype_than_its_parameter(narrow, wide, device_path):
    p = parameter(dtype=getattr(torch, narrow))
    p.grad_dtype = getattr(torch, wide)
    optimizer, scaler = torch.optim.SGD([p], lr=0.5, foreach=False), scaler_of(device_path)
    for value, stepped in (
        (8.0, True),
        (math.inf, False),
        (1e300 if wide == "float64" else 0.0, 0),
    ):
        p.grad = torch.full((3,), value, dtype=getattr(torch, wide))
        scaler.get_scale()  # gradients scaled by hand
        scaler.step(optimizer)
        scaler.update()
        if value:
            assert scaler.result.stepped is bool(stepped)
        assert (p == 0.5).all()


# Calls


@both_paths
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["own", "global", "masters"])
def test_a_hook_that_spoils_a_gradient_makes_the_step_a_skip(where, fused, device_path):
    """Hooks run inside optimizer.step(), after the look."""
    p = parameter(dtype=torch.float16 if where == "masters" else torch.float32)
    kind = MasterWeights if where == "masters" else None
    made = (torch.optim.SGD, [p]) if kind else ([p],)
    optimizer = (kind or torch.optim.SGD)(*made, lr=1.0, fused=fused)
    scaler, spoils = scaler_of(device_path, names={"p": p}), [False]

    def hook(optimizer, args, kwargs):
        if spoils[0]:
            p.grad[1] = math.nan
        else:
            p.grad.mul_(0.5)

    register = optimizer.register_step_pre_hook
    handle = (register_optimizer_step_pre_hook if where == "global" else register)(hook)
    try:
        for spoil in (False, True, False):
            spoils[0] = spoil
            optimizer.zero_grad()
            before = p.detach().clone()
            scaler.scale(p.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.result.stepped is not spoil
            assert torch.equal(p.detach(), before if spoil else before - 0.5)
            if spoil:
                assert list(scaler.result.culprits) == ["p"]
    finally:
        handle.remove()
    assert scaler.skipped_steps == 1
    assert not optimizer._optimizer_step_pre_hooks  # ours left with theirs


NAN_LR = (
    ("lr", math.nan),
    ("lr", math.inf),
    ("lr", np.float32(math.nan)),
    ("lr", np.float64(math.inf)),
)
SETTINGS = (*NAN_LR, ("lr", torch.tensor(math.nan)), ("weight_decay", math.nan))


@both_paths
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_setting_that_is_not_finite_writes_nothing(name, value, closure, device_path):
    p = parameter()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaler_of(device_path)
    optimizer.param_groups[0][name] = value

    def forward():
        optimizer.zero_grad()
        scaler.scale(loss := p.sum()).backward()
        return loss

    called = "learning rate" if name == "lr" else name
    with pytest.raises(SettingsError, match=f"the {called} is {float(value)}: nothing was written"):
        scaler.step(optimizer, forward) if closure else (forward(), scaler.step(optimizer))
    assert (p == 1).all()


@both_paths
def test_a_parameter_that_would_be_unscaled_twice_is_refused(device_path):
    p = parameter()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaler_of(device_path, names={"p": p})
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [p]})
    scaler.scale(p.sum()).backward()
    with pytest.raises(MisuseError, match="is in this optimizer twice"):
        scaler.step(optimizer)
    a, b = (torch.optim.SGD([p], lr=1.0) for _ in range(2))
    scaler.step(a)
    with pytest.raises(MisuseError, match="p is in two optimizers that step in one window"):
        scaler.step(b)
    assert not p.any()


@both_paths
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_state_loaded_in_mid_window_leaves_gradients_without_a_known_scale(unscaled, device_path):
    p = parameter()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaler_of(device_path)
    state = {**scaler.state_dict(), "scale": 64.0}
    scaler.scale(p.sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.load_state_dict(state)
    with pytest.raises(MisuseError, match="came between scale\\(\\) and step\\(\\)"):
        scaler.step(optimizer)
    assert (p == 1).all()
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert not p.any()


@both_paths
def test_a_group_added_after_unscale_has_gradients_that_still_carry_the_scale(device_path):
    p, q = parameter(), parameter()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaler_of(device_path)
    scaler.scale((p * q).sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [q]})
    with pytest.raises(MisuseError, match="a parameter group was added after unscale_\\(\\)"):
        scaler.step(optimizer)
    assert (p == 1).all()
    assert (q == 1).all()
    scaler.update()
    optimizer.zero_grad()
    scaler.scale((p * q).sum()).backward()
    scaler.step(optimizer)
    assert not p.any()
    assert not q.any()


@both_paths
def test_parameters_frozen_thawed_and_added(device_path):
    p, q, r = (parameter() for _ in range(3))
    optimizer, scaler = torch.optim.Adam([p, q], lr=0.1), scaler_of(device_path)
    for i in range(4):
        optimizer.zero_grad()
        q.requires_grad_(i % 2 == 0)
        kept = q.detach().clone()
        scaler.scale((p + q).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(q.detach(), kept) is (i % 2 == 1)
    optimizer.add_param_group({"params": [r]})
    optimizer.zero_grad()
    scaler.scale((p + r * math.nan).sum()).backward()
    scaler.step(optimizer)
    assert not scaler.result.stepped
    assert (r == 1).all()


@both_paths
def test_threads_beside_each_other(device_path):
    found = []

    def train(i):
        p = parameter()
        optimizer, scaler = torch.optim.SGD([p], lr=0.01), scaler_of(device_path)
        for step in range(50):
            optimizer.zero_grad()
            scaler.scale((p * (math.nan if step % 7 == i else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.skipped_steps, bool(p.isfinite().all())))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(7, True), (7, True), (8, True)]


def test_a_forked_child_goes_on_and_writes_no_lines(tmp_path):
    p = parameter()
    optimizer, scaler = (
        torch.optim.SGD([p], lr=0.1),
        GradScaler("cpu", journal=tmp_path / "j.jsonl"),
    )

    def step():
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    child = os.fork()
    if child == 0:
        try:
            step()
            os._exit(0 if scaler.result.stepped else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    step()
    assert [s.step for s in read_journal(tmp_path / "j.jsonl").steps] == [0, 1]

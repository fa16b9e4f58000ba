"""Calls and settings that cannot work are refused with what to do instead."""

import functools
import json

import pytest
import torch
import torchao
from helpers.torch import bits, both_paths, good, made, net
from torch.distributed.optim import _apply_optimizer_in_backward

from gradlift import Cause
from gradlift.errors import GradliftError, MisuseError, SettingsError
from gradlift.torch import GradScaler


def test_complex_gradients_are_refused():
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    w.grad = torch.ones_like(w)
    with pytest.raises(MisuseError, match="is complex"):
        GradScaler("cpu").step(torch.optim.SGD([w], lr=1.0))


def test_float16_parameters_are_refused_by_name_with_the_remedy():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(MisuseError, match=r"1\.weight and 1 more are float16.*MasterWeights\(SGD"):
        GradScaler("cpu").step(optimizer)
    scaler = GradScaler("cpu", allow_fp16_params=True, init_scale=1.0)
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    assert model[1].bias.dtype is torch.float16


# A step without scale(loss)


@both_paths
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("when", ["first", "later", "after update(new_scale)", "another key"])
def test_gradients_of_a_loss_that_was_not_scaled_are_refused(device_path, fused, call, when):
    w, optimizer, scaler = made(device_path, fused)
    if when == "later":
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    before = bits(w)
    if when == "after update(new_scale)":
        scaler.scale(w.sum()).backward()
        scaler.update(8.0)
    elif when == "another key":
        scaler.scale(w.sum(), key="d").backward()
    else:
        w.sum().backward()
    gradient = bits(w.grad)
    args = (optimizer, 1.0) if call == "clip_grad_norm_" else (optimizer,)
    said = rf"no loss was scaled since the last update\(\), so {call}\(\) would divide"
    for _ in range(2):  # and again
        with pytest.raises(MisuseError, match=said):
            getattr(scaler, call)(*args)
    assert (bits(w), bits(w.grad)) == (before, gradient)
    if when == "another key":
        scaler.step(optimizer, key="d")
        assert w.item() == -1.0
        return
    optimizer.zero_grad()
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    assert w.item() == (-2.0 if when == "later" else -1.0)


@both_paths
def test_whoever_asks_for_the_scale_may_scale_by_hand(device_path):
    w, optimizer, scaler = made(device_path)
    for _ in range(2):
        optimizer.zero_grad()
        (w.sum() * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == -2.0
    optimizer.zero_grad()
    w.sum().backward()  # asked in the window before: that does not count
    with pytest.raises(MisuseError, match="no loss was scaled"):
        scaler.step(optimizer)
    scaler.get_scale()
    scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(MisuseError, match="no loss was scaled"):
        scaler.step(optimizer)
    assert w.item() == -2.0


def test_a_closure_that_does_not_scale_is_refused_and_undone():
    w = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.LBFGS([w]), GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    with pytest.raises(MisuseError, match="no loss was scaled"):
        scaler.step(optimizer, closure)
    assert (w == 1).all()


@both_paths
def test_a_step_without_gradients_needs_no_loss(device_path):
    w, optimizer, scaler = made(device_path)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.result.cause is Cause.NO_GRADIENTS
    assert w.item() == 0.0


@both_paths
@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "Adagrad", "fused Adagrad"]
)
def test_a_setting_that_is_zero_in_float16_is_found_before_the_first_step(device_path, kind):
    w = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
    w.grad = torch.zeros_like(w)
    fused, kind = kind.startswith("fused"), kind.split()[-1]
    made = functools.partial(getattr(torch.optim, kind), **{"fused" if fused else "foreach": fused})
    optimizer = made([w])
    scaler = GradScaler("cpu", allow_fp16_params=True, init_scale=1.0)
    scaler._force_device_path = device_path
    said = (
        rf"eps=1e-(08|10) of {kind} is 0 in float16.*Pass eps=1e-4 or more.*MasterWeights\({kind}"
    )
    scaler.get_scale()  # gradients scaled by hand
    with pytest.raises(MisuseError, match=said):
        scaler.step(optimizer)
    assert (w == 1).all()
    safe = made([w], eps=1e-4)
    for _ in range(3):
        scaler.get_scale()  # gradients scaled by hand
        scaler.step(safe)
        scaler.update()
    assert w.isfinite().all()
    later = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    later.grad = torch.zeros_like(later)
    safe.add_param_group({"params": [later], "eps": 1e-8})
    scaler.get_scale()  # gradients scaled by hand
    with pytest.raises(MisuseError, match="eps=1e-08 of"):
        scaler.step(safe)
    assert (later == 1).all()


def test_a_setting_that_vanishes_is_a_warning_where_the_optimizer_may_compute_in_float32():
    class Theirs(torch.optim.Adam):
        __module__ = "theirs"

    w = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    w.grad = torch.ones_like(w)
    scaler = GradScaler("cpu", allow_fp16_params=True, init_scale=1.0)
    scaler.get_scale()  # gradients scaled by hand
    with pytest.warns(UserWarning, match="eps=1e-08 of Theirs is 0 in float16"):
        scaler.step(Theirs([w]))
    fused = torch.optim.Adam([w], fused=True)  # computes in float32
    scaler.update()
    w.grad = torch.zeros_like(w)
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(fused)
    assert w.isfinite().all()


@both_paths
def test_complex_parameters_beside_real_ones_get_a_clear_answer(device_path):
    w, z = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat))
    w.grad, z.grad = torch.ones_like(w), torch.ones_like(z)
    scaler = GradScaler("cpu", names={"z": z})
    scaler._force_device_path = device_path
    with pytest.raises(MisuseError, match="is complex; loss scaling is for real numbers"):
        scaler.step(torch.optim.SGD([w, z], lr=1.0))
    assert (w == 1).all()
    assert (z == 1).all()


# Misuse
def test_unscale_twice_is_harmless_unless_something_came_between():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(good(model)).backward()
    scaler.unscale_(optimizer)
    once = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    assert bits(once) == bits([p.grad for p in model.parameters()])
    scaler.scale(good(model)).backward()
    with pytest.raises(MisuseError, match="mix scaled and unscaled"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="mix scaled and unscaled"):
        scaler.step(optimizer)


def test_errors_name_the_missing_call():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(good(model)).backward()
    scaler.step(optimizer)
    for again in (scaler.step, scaler.unscale_):
        with pytest.raises(MisuseError, match=r"call scaler\.update\(\) first"):
            again(optimizer)
    with pytest.raises(GradliftError, match="copied or pickled between update"):
        scaler.__getstate__()
    with pytest.raises(MisuseError, match="wants a tensor"):
        scaler.scale(3.0)
    with pytest.raises(MisuseError, match="floating-point loss"):
        scaler.scale(torch.tensor(3))
    with pytest.raises(MisuseError, match="wants an optimizer"):
        scaler.step(model)
    with pytest.raises(SettingsError, match="max_norm is 0"):
        scaler.clip_grad_norm_(optimizer, 0)
    with pytest.raises(SettingsError, match="expected 'each' or 'all'"):
        GradScaler("cpu", skip="some")


def test_optimizers_that_step_inside_backward_are_refused_by_name():
    model = net(8, 1)
    scaler = GradScaler("cpu")
    scaler.scale(good(model)).backward()
    offloading = object.__new__(torchao.optim.CPUOffloadOptimizer)  # to make one takes a GPU
    with pytest.raises(MisuseError, match="cannot guard a CPUOffloadOptimizer"):
        scaler.step(offloading)
    params = list(model.parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})
    with pytest.raises(MisuseError, match=r"stepped by an optimizer inside backward\(\)"):
        scaler.step(torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("setting", ["init_scale", "growth_factor", "backoff_factor"])
def test_a_factor_that_is_no_power_of_two_warns_once(setting):
    value = {"init_scale": 1000.0, "growth_factor": 1.5, "backoff_factor": 0.7}[setting]
    with pytest.warns(UserWarning, match=f"{setting}={value}: not a power of two") as caught:
        GradScaler("cpu", **{setting: value})
    assert len(caught) == 1


@both_paths
def test_unscale_without_gradients(device_path):
    _, optimizer, scaler = made(device_path)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.result.cause is Cause.NO_GRADIENTS


def test_skip_all_cannot_hold_back_a_closure():
    w, _, scaler = made(skip="all")
    with pytest.raises(MisuseError, match="skip='all' cannot hold back a LBFGS"):
        scaler.step(torch.optim.LBFGS([w]), lambda: None)


def test_settings_of_torchs_rule_do_not_go_with_another():
    with pytest.raises(SettingsError, match="belong into the rule"):
        GradScaler("cpu", init_scale=8.0, rule="auto")
    with pytest.raises(SettingsError, match="belong into the rule"):
        GradScaler("cpu", max_scale=8.0, rule="auto")


def test_asking_for_an_unknown_key_makes_none():
    _, _, scaler = made()
    assert scaler.get_scale("typo") == 2.0**16
    assert scaler.state_dict()["gradlift"]["keys"] == "{}"


def test_a_refusal_leaves_nothing_behind():
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    w.grad = torch.ones_like(w)
    scaler = GradScaler("cpu")
    with pytest.raises(MisuseError, match="is a float16 parameter"):
        scaler.step(torch.optim.SGD([w], lr=1.0))
    json.dumps(scaler.__getstate__()["_saved"])

"""apex's FP16_Optimizer and network_to_half, told as stories with exact numbers."""

import copy
import types

import pytest
import torch
from torch import nn

from gradlift import Journal, read_journal
from gradlift.apex.fp16_utils import FP16_Optimizer, network_to_half
from gradlift.errors import MisuseError, SettingsError, StateError
from gradlift.torch import MasterWeights

LINE = "OVERFLOW! Skipping step. Attempted loss scale: {}, reducing to {}\n"


def weight(*values):
    return nn.Parameter(torch.tensor(values or (0.0,)).half())


def sgd(*params, lr=1.0):
    return torch.optim.SGD(params, lr=lr)


def loss(w, x):
    """w * x, in float32."""
    return (w.float() * x).sum()


def test_a_static_scale_carries_small_gradients_into_the_masters():
    w = weight(1.0)
    optimizer = FP16_Optimizer(sgd(w), static_loss_scale=2.0**12)
    small = 2.0**-30
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(loss(w, small))
        assert w.grad.item() == small * 2.0**12
        optimizer.step()
    assert optimizer.optimizer.masters[0].item() == pytest.approx(1 - 4 * small)
    assert (w.item(), optimizer.loss_scale, optimizer.overflow) == (1.0, 2.0**12, False)


def test_the_dynamic_scale_comes_down_from_2_to_the_32_and_says_so(capsys):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**32
    for _ in range(18):
        optimizer.zero_grad()
        optimizer.backward(loss(w, 1.0))
        optimizer.step()
    assert optimizer.loss_scale == 2.0**15
    assert w.item() == -1.0
    said = capsys.readouterr().out
    assert said.count("\n") == 17
    assert said.startswith(LINE.format(2.0**32, 2.0**31))


def test_dynamic_arguments():
    arguments = {"init_scale": 2.0**10, "scale_factor": 4.0, "scale_window": 2}
    w = weight()
    optimizer = FP16_Optimizer(
        sgd(w), dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False
    )
    scales = []
    for x in (1.0, 1.0, 100.0, 1.0):
        optimizer.zero_grad()
        optimizer.backward(loss(w, x))
        scales.append(optimizer.loss_scale)
        optimizer.step()
    assert scales == [2.0**10, 2.0**10, 2.0**12, 2.0**10]
    assert w.item() == -3.0
    with pytest.raises(SettingsError, match="'window'"):
        FP16_Optimizer(sgd(w), dynamic_loss_scale=True, dynamic_loss_args={"window": 1})


@pytest.mark.parametrize("update", [True, False])
def test_several_losses_add_up(update):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), 4.0)
    for x in (1.0, 2.0):
        optimizer.backward(loss(w, x), update_master_grads=update)
    optimizer.update_master_grads()
    assert optimizer.inspect_master_grad_data()[0][0].tolist() == [3.0]
    optimizer.step()
    assert w.item() == -3.0
    kept = loss(w, 1.0)
    optimizer.zero_grad(set_grads_to_None=True)
    assert w.grad is None
    optimizer.backward(kept, retain_graph=True)
    optimizer.backward(kept)
    optimizer.step()
    assert w.item() == -5.0


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_clipping(norm_type):
    w = weight(0.0, 0.0)
    optimizer = FP16_Optimizer(sgd(w), 8.0)
    optimizer.backward(loss(w, torch.tensor([3.0, 4.0])))
    norm = {2: 5.0, 1: 7.0, float("inf"): 4.0}[norm_type]
    assert optimizer.clip_master_grads(norm / 2, norm_type) == norm
    optimizer.step()
    assert w.tolist() == pytest.approx([-1.5, -2.0], rel=1e-3)


def test_after_an_overflow_the_norm_is_minus_one(capsys):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), dynamic_loss_scale=True)
    optimizer.backward(loss(w, 1.0))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert optimizer.overflow
    optimizer.zero_grad()
    optimizer.loss_scale = 8.0
    optimizer.backward(loss(w, 1.0))
    assert not optimizer.overflow
    optimizer.step()
    assert (w.item(), optimizer.loss_scale) == (-1.0, 8.0)


def test_a_batch_can_be_left_out_after_a_look_at_it():
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), 2.0**12)
    for x in (100.0, 4.0):  # an overflow, a large norm
        optimizer.backward(loss(w, x))
        assert optimizer.clip_master_grads(10.0) in (-1, 4.0)
        optimizer.zero_grad()
    optimizer.backward(loss(w, 1.0))
    assert not optimizer.overflow  # a look between two passes
    optimizer.backward(loss(w, 2.0))
    assert optimizer.clip_master_grads(10.0) == 3.0
    with pytest.raises(MisuseError, match="after the last backward"):
        optimizer.backward(loss(w, 1.0))
    optimizer.step()
    assert w.item() == -3.0


def test_a_static_scale_is_checked_and_can_be_set(capsys):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), 2.0**10)
    optimizer.backward(loss(w, 100.0))
    optimizer.step()
    said = "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, keeping 1024.0\n"
    assert capsys.readouterr().out == said
    assert w.item() == 0.0
    optimizer.loss_scale = 2.0**4
    optimizer.zero_grad()
    optimizer.backward(loss(w, 100.0))
    optimizer.step()
    assert (w.item(), optimizer.loss_scale) == (-100.0, 16.0)
    with pytest.warns(UserWarning, match="not a power of two"):
        optimizer.loss_scale = 1000.0
    optimizer.loss_scale = 2.0  # and back
    optimizer.zero_grad()
    optimizer.backward(loss(w, 1.0))
    with pytest.raises(MisuseError, match=r"gradients have 2\.0 in them"):
        optimizer.loss_scale = 8.0
    optimizer.step()
    assert (w.item(), optimizer.loss_scale) == (-101.0, 2.0)


def test_a_loss_that_is_not_finite_keeps_the_scale(capsys):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), dynamic_loss_scale=True)
    optimizer.backward(loss(w, float("nan")))
    optimizer.step()
    assert optimizer.loss_scale == 2.0**32
    assert capsys.readouterr().out.startswith("LOSS IS NOT FINITE! Skipping step.")


def test_nothing_to_step_is_silent(capsys):
    w = weight()
    optimizer = FP16_Optimizer(sgd(w), dynamic_loss_scale=True)
    optimizer.step()
    assert (w.item(), optimizer.overflow, capsys.readouterr().out) == (0.0, False, "")


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_a_closure_is_called_again_after_an_overflow(kind, capsys):
    w = weight(1.0)
    inner = getattr(torch.optim, kind)([w], lr=0.25)
    optimizer = FP16_Optimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**17}
    )
    losses = []

    def closure():
        optimizer.zero_grad()
        value = w.float().square().sum()
        optimizer.backward(value)
        losses.append(value.item())
        optimizer.clip_master_grads(100.0)
        return value

    value = optimizer.step(closure)
    assert value.item() == 1.0
    said = capsys.readouterr().out.splitlines()
    start = "OVERFLOW within closure! Skipping step. Attempted loss scale: "
    assert said == [
        f"{start}131072.0, reducing to 65536.0",
        f"{start}65536.0, reducing to 32768.0",
        f"{start}32768.0, reducing to 16384.0",
    ]
    assert losses[:4] == [1.0] * 4
    assert w.item() == 0.5 if kind == "SGD" else abs(w.item()) < 0.1


def test_in_a_closure_gradients_cannot_be_looked_at():
    w = weight(1.0)
    optimizer = FP16_Optimizer(sgd(w), 8.0)

    def closure():
        optimizer.backward(loss(w, 1.0))
        optimizer.inspect_master_grad_data()

    with pytest.raises(MisuseError, match="in a closure"):
        optimizer.step(closure)


def test_float32_parameters_take_part():
    half, single = weight(1.0), nn.Parameter(torch.ones(1))
    optimizer = FP16_Optimizer(sgd(half, single), 16.0)
    optimizer.backward(loss(half, 0.5) + loss(single, 0.25))
    optimizer.step()
    assert (half.item(), single.item()) == (0.5, 0.75)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert torch.equal(optimizer.state[half]["master"], torch.tensor([0.5]))


def test_a_resumed_run_goes_on_to_the_bit():
    def begin():
        torch.manual_seed(0)
        model = network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        return model, FP16_Optimizer(adam, dynamic_loss_scale=True, verbose=False)

    def go(model, optimizer, steps):
        for i in steps:
            torch.manual_seed(i)
            optimizer.zero_grad()
            optimizer.backward(model(torch.randn(16, 4)).square().mean())
            optimizer.step()

    model, optimizer = begin()
    go(model, optimizer, range(24))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go(model, optimizer, range(24, 30))
    expected = [p.detach().clone() for p in model.parameters()], optimizer.loss_scale

    model, optimizer = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    go(model, optimizer, range(24, 30))
    assert all(map(torch.equal, expected[0], model.parameters()))
    assert optimizer.loss_scale == expected[1] < 2.0**32


def test_what_apexs_own_saved_loads():
    half, single = weight(1.0, 2.0), nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([half.detach().float().requires_grad_(), single], 1.0, momentum=0.5)
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    scaler = types.SimpleNamespace(
        cur_scale=2.0**20, cur_iter=40, last_overflow_iter=30, scale_factor=2.0, scale_window=1000
    )
    exact = torch.tensor([1 + 2.0**-20, 2.0])
    saved = {
        "loss_scaler": scaler,
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": plain.state_dict(),
        "fp32_from_fp16": [[exact]],
    }
    momentum = torch.optim.SGD([half, single], 1.0, momentum=0.5)
    optimizer = FP16_Optimizer(momentum, dynamic_loss_scale=True)
    optimizer.load_state_dict(saved)
    assert optimizer.loss_scale == 2.0**20
    assert optimizer.scaler.state_dict()["_growth_tracker"] == 9
    assert torch.equal(optimizer.optimizer.masters[0], exact)
    assert optimizer.state[half]["momentum_buffer"].tolist() == [1.0, 1.0]
    with pytest.raises(StateError, match="neither"):
        optimizer.load_state_dict({**saved, "loss_scaler": object()})
    with pytest.raises(StateError, match="lacks 'loss_scaler'"):
        optimizer.load_state_dict({})


def test_a_journal_and_another_rule(tmp_path):
    w = weight()
    with Journal(tmp_path / "run.jsonl") as journal:
        optimizer = FP16_Optimizer(sgd(w), rule="dynamic", journal=journal)
        optimizer.backward(loss(w, 0.5))
        optimizer.step()
    (step,) = read_journal(tmp_path / "run.jsonl").steps
    assert (step.scale, step.norm) == (2.0**16, 0.5)


def test_network_to_half_as_apex_names_its_parts():
    model = network_to_half(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    assert {n: p.dtype for n, p in model.named_parameters() if "bias" in n} == {
        "1.0.bias": torch.float16,
        "1.1.bias": torch.float32,
        "1.2.bias": torch.float16,
    }
    assert model(torch.randn(3, 2)).dtype == torch.float32
    assert isinstance(FP16_Optimizer(sgd(*model.parameters())).optimizer, MasterWeights)

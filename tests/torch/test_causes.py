"""Why a step was skipped, and which tensor, loss or micro-batch shows it."""

import math

import pytest
import torch
from helpers.torch import both_paths, good, nan_loss, net

from gradlift import Cause, read_journal
from gradlift.errors import TrainingHalted
from gradlift.torch import GradScaler, MasterWeights


def test_a_nan_loss_in_a_micro_batch_is_named():
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for loss in (good, nan_loss, good):
        scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    assert (scaler.result.cause, scaler.result.micro_batch) == (Cause.LOSS_NONFINITE, 1)


# Culprits
def test_culprits_come_before_clipping_and_in_the_order_of_backward():
    model = torch.nn.Sequential()
    model.add_module("body", net(8, 8, 8))
    model.add_module("head", torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(good(model)).backward()
    model.body[2].weight.grad[0, 0] = math.inf
    model.body[0].bias.grad[0] = math.nan
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # spreads the NaN everywhere
    assert model.head.weight.grad.isnan().all()
    scaler.step(optimizer)
    assert scaler.result.culprits == ("body.2.weight", "body.0.bias")
    assert [c.described for c in scaler.result.culprits] == [
        "body.2.weight (inf)",
        "body.0.bias (nan)",
    ]
    assert "first non-finite: body.2.weight (inf)" in str(scaler.result)


def test_names_may_be_given():
    w = torch.nn.Parameter(torch.ones(1))
    scaler = GradScaler("cpu", names={"my.weight": w})
    w.grad = torch.tensor([math.nan])
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(torch.optim.SGD([w], lr=1.0))
    assert scaler.result.culprits == ("my.weight",)


@both_paths
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named_at_the_first_bad_step(bad, device_path, tmp_path):
    """A poisoned checkpoint: the loss is NaN too, and no scale can help."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 1] = bad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = tmp_path / "run.jsonl"
    scaler = GradScaler("cpu", journal=where, max_consecutive_skips=1)
    scaler._force_device_path = device_path
    with pytest.raises(TrainingHalted) as halt:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    said = f"he weight 1.weight holds {bad} itself, so no scale can help"
    assert said in str(halt.value)
    assert any(said in note for note in scaler.result.notes)
    notes = [e for e in read_journal(where).events if e.what == "note"]
    assert [(e.step, e.detail["code"]) for e in notes] == [(0, "weights-nonfinite")]


def test_a_masters_weight_that_is_not_finite_is_named():
    w = torch.nn.Parameter(torch.tensor([1.0, math.nan], dtype=torch.float16))
    optimizer, scaler = (
        MasterWeights(torch.optim.SGD, [w], lr=0.1),
        GradScaler("cpu", names={"w": w}),
    )
    scaler.scale(w.float().sum() ** 2).backward()
    scaler.step(optimizer)
    assert "the weight w holds nan itself" in scaler.result.notes[0]


def test_weights_are_not_read_while_all_is_well(monkeypatch):
    from gradlift.torch.scaler import scale

    monkeypatch.setattr(scale, "about_weights", lambda *_: 1 / 0)
    w = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([w], lr=0.1), GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(w.sum() * math.nan).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)


@both_paths
def test_two_nets_are_named_alike_with_and_without_a_journal(device_path, tmp_path):
    """The second net is bad first, so that its names are looked for first."""
    found = []
    for journal in (None, tmp_path / "run.jsonl"):
        nets = [net(8, 1), net(8, 1)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
        scaler = GradScaler("cpu", init_scale=2.0**10, journal=journal)
        scaler._force_device_path = device_path
        for bad in (1, 0, 1):
            for i, (each, optimizer) in enumerate(zip(nets, optimizers)):
                optimizer.zero_grad()
                scaler.scale(good(each) * (math.inf if i == bad else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                found += scaler.result.culprits[:1]
            scaler.update()
        scaler.flush()
        del nets, optimizers, scaler  # else their names are taken
    assert found[:3] == found[3:] == ["0.bias [2]", "0.bias", "0.bias [2]"]

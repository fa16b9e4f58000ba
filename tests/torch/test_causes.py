"""Why a step was skipped, and which tensor, loss or micro-batch shows it."""

import math

import torch
from helpers.torch import dead, good, made, net

from gradlift import Cause
from gradlift.torch import GradScaler


def test_a_nan_loss_in_a_micro_batch_is_named():
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for loss in (good, dead, good):
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
    scaler.step(torch.optim.SGD([w], lr=1.0))
    assert scaler.result.culprits == ("my.weight",)


def test_the_first_bad_micro_batch_is_found_with_two_optimizers():
    a, opt_a, scaler = made(init_scale=4.0)
    b = torch.nn.Parameter(torch.zeros(1))
    opt_b = torch.optim.SGD([b], lr=1.0)
    for first in (1.0, 3e38):
        for i in range(4):
            scaler.scale((a * (first if i == 0 else 1.0)).sum() + b.sum()).backward()
        scaler.step(opt_a)
        told = scaler.result
        scaler.step(opt_b)
        scaler.update()
    assert told.micro_batch == 0

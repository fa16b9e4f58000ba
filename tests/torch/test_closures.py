"""Optimizers that call the loss themselves: step(closure)."""

import math

import pytest
import torch
from helpers.torch import X, bits, good, half_loss, net

from gradlift.errors import MisuseError
from gradlift.torch import GradScaler


def test_lbfgs_is_sent_to_step():
    model = net(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(MisuseError, match=r"LBFGS asks for it many times: call scaler\.step"):
        GradScaler("cpu").train_step(lambda: good(model), optimizer)


def test_gradients_of_others_are_not_added_twice():
    body, head = net(8, 8), net(8, 1, seed=1)
    model = torch.nn.ModuleDict({"body": body, "head": head})
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for init, retries in ((2.0**24, 20), (None, 0)):
        for p in body.parameters():
            p.grad = torch.ones_like(p)
        scaler = GradScaler("cpu", init_scale=init or result.scale)  # noqa: F821
        start = {k: v.clone() for k, v in model.state_dict().items()}
        result = scaler.train_step(
            lambda: half_loss(torch.nn.Sequential(body, torch.nn.Tanh(), head), X, 4.0),
            optimizer,
            retries=retries,
            model=model if retries else None,
        )
        model.load_state_dict(start)
        grads = [p.grad.clone() for p in body.parameters()]
        if retries:
            assert result.retries
            kept = grads
    assert bits(kept) == bits(grads)


def test_several_losses_are_added_up():
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu")
    scaler.train_step(lambda: ((w * 2).sum(), (w * 3).sum()), optimizer)
    assert w.item() == -5.0


# Closures
def rosenbrock(w):
    return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2


def lbfgs(scaled, inject_at=None):
    w = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
    optimizer = torch.optim.LBFGS([w], line_search_fn="strong_wolfe", max_iter=5)
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = rosenbrock(w)
        scaler.scale(loss).backward()
        if calls == inject_at:
            w.grad[0] = math.inf
        return loss

    trail = []
    for _ in range(8):
        if scaled:
            scaler.step(optimizer, closure)
            scaler.update()
        else:
            optimizer.step(closure)
        trail.append((scaler.result.stepped if scaled else True, w.detach().clone()))
    return trail


def test_lbfgs_equals_float32_and_survives_an_overflow_in_its_search():
    plain, clean, hit = lbfgs(False), lbfgs(True), lbfgs(True, inject_at=9)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain, clean))
    skipped = [i for i, (stepped, _) in enumerate(hit) if not stepped]
    assert len(skipped) == 1
    at = skipped[0]
    assert torch.equal(hit[at][1], hit[at - 1][1])  # put back
    rest = [w for i, (_, w) in enumerate(hit) if i != at]
    assert all(torch.equal(a, b[1]) for a, b in zip(rest, plain))  # and then as if nothing was


def test_gradients_unscaled_in_a_closure_are_not_divided_twice():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10)

    def closure():
        optimizer.zero_grad()
        loss = (3 * weight).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        weight.grad.clamp_(-2, 2)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert weight.item() == -2

"""A step that is not finite changes nothing, and says so."""

import math

import pytest
import torch
import torchao
from helpers.torch import X, bits, exploding, good, half_loss, nan_loss, net, train, value

from gradlift import Cause
from gradlift.torch import GradScaler


@pytest.mark.parametrize("fused", [True, False])
def test_200_nan_losses_then_good_data(fused):
    model = net(8, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    before = bits(model)
    results = train(scaler, model, optimizer, [nan_loss] * 200)
    assert {r.cause for r in results} == {Cause.LOSS_NONFINITE}
    assert scaler.get_scale() == 2.0**10
    assert before == bits(model)
    assert (scaler.skipped_steps, scaler.consecutive_skips) == (200, 200)
    first = value(model)
    results = train(scaler, model, optimizer, [good] * 50)
    assert all(r.stepped for r in results)
    assert value(model) < first / 2


@pytest.mark.parametrize("fused", [True, False])
def test_250_real_overflows_then_good_data(fused):
    model = net(8, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu")
    results = train(scaler, model, optimizer, [exploding] * 250)
    assert scaler.get_scale() == 2.0**-24
    assert results[0].cause is Cause.OVERFLOW
    assert results[-1].cause is Cause.FLOOR
    assert not any(r.stepped for r in results)
    first = value(model)
    results = train(scaler, model, optimizer, [lambda m: half_loss(m, X, 2.0**10)] * 60)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert value(model) < first


def test_torch_itself_writes_non_finite_weights_there():
    """The meta-test of the story above: the trap is real."""
    for make, finite in ((torch.amp.GradScaler, False), (GradScaler, True)):
        model = net(8, 8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = make("cpu")
        for i in range(200):
            optimizer.zero_grad()
            scaler.scale(good(model)).backward()
            if i < 170:
                model[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.isfinite(p).all() for p in model.parameters()) == finite


def test_fused_and_unfused_skips_report_alike_and_nothing_else_moves():
    told = []
    for fused in (True, False):
        model = net(8, 8, 1)
        ema = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = GradScaler("cpu", init_scale=2.0**12, names=model)
        rows = []
        for loss in (good, exploding, nan_loss, good):
            result = scaler.train_step(
                lambda loss=loss, m=model: loss(m), optimizer, scheduler=schedule
            )
            if result.stepped:
                for e, p in zip(ema, model.parameters()):
                    e.lerp_(p.detach(), 0.1)
            else:
                assert all(p.grad is None for p in model.parameters())
            state = optimizer.state[model[0].weight]
            counted = int(state["step"]) if state else 0
            rows.append((result.stepped, result.cause, result.scale, result.culprits, counted))
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 4  # two steps were applied
        assert [r[4] for r in rows] == [1, 1, 1, 2]
        told.append(rows)
    assert told[0] == told[1]
    assert [row[1] for row in told[0]] == [0, Cause.OVERFLOW, Cause.LOSS_NONFINITE, 0]
    assert set(told[0][1][3]) == {n for n, _ in net(8, 8, 1).named_parameters()}


def test_an_8_bit_optimizer_steps_and_skips():
    model = net(256, 32, 1)
    optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    x = torch.randn(4, 256)
    first = half_loss(model, x).item()
    with torch.compiler.set_stance("force_eager"):
        for i in range(8):
            before = bits(model)
            loss = half_loss(model, x, 1e30 if i == 4 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            assert scaler.result.stepped == (i != 4)
            assert (before == bits(model)) == (i == 4)
    assert half_loss(model, x).item() < first / 2

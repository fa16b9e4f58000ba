"""What is used is what is checked: every element, every format, every layout."""

import math

import pytest
import torch
from helpers.torch import both_paths, made

from gradlift.torch import GradScaler


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-10])
def test_what_is_applied_is_checked(fused, scale):
    """Finite gradients that 1/scale carries out of float32: no weight may become inf."""
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=scale)
    w.grad = torch.tensor([1.0, 3e38, 1.0, 1.0])
    scaler.step(optimizer)
    assert not scaler.result.stepped
    assert (w == 1).all()


def test_norm_of_100_million_elements():
    g = torch.randn(100_000_000, generator=torch.Generator().manual_seed(0))
    w = torch.nn.Parameter(torch.zeros_like(g))
    w.grad = g
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    truth = math.sqrt(sum(float(c.double().square().sum()) for c in g.split(2**22)))
    assert norm == pytest.approx(truth, rel=1e-5)
    assert float(torch.linalg.vector_norm(g)) != pytest.approx(truth, rel=1e-4)  # torch's own


def test_sums_of_squares_that_overflow_or_vanish_are_confirmed():
    w = torch.nn.Parameter(torch.zeros(1000))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
    for size in (1e18, 1e36, 1e-25, 1e-40):
        w.grad = torch.full((1000,), size)
        norm = scaler.clip_grad_norm_(optimizer, 1e38).item()
        assert norm == pytest.approx(float(w.grad[0]) * math.sqrt(1000), rel=1e-6)
        scaler.step(optimizer)
        assert scaler.result.stepped
        scaler.update()


# Gradients of all kinds
@pytest.mark.parametrize("fused", [True, False])
def test_mixed_gradient_dtypes(fused):
    params = [
        torch.nn.Parameter(torch.ones(3, dtype=t))
        for t in (torch.float32, torch.bfloat16, torch.float64)
    ]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for p in params:
        p.grad = torch.full_like(p, 0.5 * 2**10)
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 1.5
    scaler.step(optimizer)
    assert all((p == 0.5).all() for p in params)
    scaler.update()
    params[1].grad = torch.full_like(params[1], math.nan)
    scaler.step(optimizer)
    assert not scaler.result.stepped
    assert [c.kind for c in scaler.result.culprits] == ["nan"]


def test_sparse_gradients_are_added_up_before_they_are_judged():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**4)
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    assert scaler.result.stepped
    assert table.weight.grad._values().tolist() == [[2.0, 2.0], [1.0, 1.0]]
    scaler.update()
    values = torch.full((2, 2), 3e38)
    table.weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], values, (4, 2), check_invariants=True
    )  # their sum is inf
    scaler.step(optimizer)
    assert not scaler.result.stepped


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "expanded"])
def test_memory_layouts(layout):
    base = torch.arange(1.0, 25.0)
    g = {
        "channels_last": base.view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "transposed": base.view(4, 6).t(),
        "strided": torch.arange(1.0, 49.0)[::2],
        "expanded": torch.tensor(3.0).expand(5),
    }[layout]
    w = torch.nn.Parameter(torch.zeros(g.shape))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=4.0)
    w.grad = g
    expected = -(g / 4).clone()
    norm = scaler.clip_grad_norm_(optimizer, 1e6)
    assert norm.item() == pytest.approx(float(expected.norm()), rel=1e-6)
    scaler.step(optimizer)
    assert torch.equal(w.detach(), expected)


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_exchanged_after_unscale_is_the_one_that_counts(device_path, fused):
    w, optimizer, scaler = made(device_path, fused)
    scaler.scale((w * 3).sum()).backward()
    scaler.unscale_(optimizer)
    w.grad = w.grad * 100
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.result.grad_norm == 300.0
    assert w.item() == pytest.approx(-1.0, rel=1e-5)


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_put_there_after_unscale_is_not_applied(device_path, fused):
    w, optimizer, scaler = made(device_path, fused)
    scaler.scale((w * 3).sum()).backward()
    scaler.unscale_(optimizer)
    w.grad = torch.tensor([math.nan])
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.result.stepped
    assert [c.kind for c in scaler.result.culprits] == ["nan"]
    assert (w.item(), scaler.get_scale()) == (0.0, 2.0**15)

"""What is used is what is checked: every element, every format, every layout."""

import math

import pytest
import torch
from helpers.torch import both_paths, made

from gradlift import Cause
from gradlift.torch import GradScaler, MasterWeights


@both_paths
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-10])
def test_what_is_applied_is_checked(device_path, fused, scale):
    """Finite gradients that 1/scale carries out of float32: no weight may become inf."""
    w, optimizer, scaler = made(device_path, fused, size=4, init_scale=scale)
    w.grad = torch.tensor([1.0, 3e38, 1.0, 1.0])
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    assert not scaler.result.stepped
    assert (w == 0).all()


@both_paths
@pytest.mark.parametrize("first", ["", "unscale_", "clip"])
def test_what_leaves_float16_is_not_applied_in_float16(device_path, first):
    """A float16 gradient is unscaled in place: finite as scaled, inf as used."""
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**-4, allow_fp16_params=True)
    scaler._force_device_path = device_path
    for size, stepped in ((65504 / 8, False), (65504 / 32, True)):
        w.grad = torch.tensor([1.0, -size, 1.0, 1.0]).half()
        scaler.get_scale()  # gradients scaled by hand
        if first == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=1e30 if first == "clip" else None)
        assert scaler.result.stepped == stepped
        assert w.isfinite().all()
        assert w.any() == stepped
        scaler.update(2.0**-4)


def test_norm_of_100_million_elements():
    g = torch.randn(100_000_000, generator=torch.Generator().manual_seed(0))
    w = torch.nn.Parameter(torch.zeros_like(g))
    w.grad = g
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
    scaler.get_scale()  # gradients scaled by hand
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    truth = math.sqrt(sum(float(c.double().square().sum()) for c in g.split(2**22)))
    assert norm == pytest.approx(truth, rel=1e-5)
    assert float(torch.linalg.vector_norm(g)) != pytest.approx(truth, rel=1e-4)  # torch's own


def test_sums_of_squares_that_overflow_or_vanish_are_confirmed():
    w = torch.nn.Parameter(torch.zeros(1000))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=1.0)
    for size in (1e18, 1e36, 1e-25, 1e-40):
        w.grad = torch.full((1000,), size)
        scaler.get_scale()  # gradients scaled by hand
        norm = scaler.clip_grad_norm_(optimizer, 1e38).item()
        assert norm == pytest.approx(float(w.grad[0]) * math.sqrt(1000), rel=1e-6, abs=0)
        scaler.step(optimizer)
        assert scaler.result.stepped
        scaler.update()


@both_paths
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["step", "clip_grad_norm_", "unscaled first", "skip=all"])
def test_a_norm_that_leaves_float32_is_no_step(device_path, fused, how):
    """Every element is finite, and nothing can be divided by their norm."""
    w, optimizer, scaler = made(
        device_path, fused, 1000, init_scale=2.0, skip="all" if how == "skip=all" else "each"
    )
    scaler.scale((w * 1.5e38).sum()).backward()
    if how == "unscaled first":
        scaler.unscale_(optimizer)
    if how in ("unscaled first", "clip_grad_norm_"):
        assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
        scaler.step(optimizer)
    else:
        scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert (w == 0).all()
    if device_path and how == "unscaled first":  # only here the coefficient of 0 is applied
        return
    assert scaler.result.skipped
    assert scaler.get_scale() == 1.0


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
    scaler.get_scale()  # gradients scaled by hand
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 1.5
    scaler.step(optimizer)
    assert all((p == 0.5).all() for p in params)
    scaler.update()
    params[1].grad = torch.full_like(params[1], math.nan)
    scaler.get_scale()  # gradients scaled by hand
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
    scaler.get_scale()  # gradients scaled by hand
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
    scaler.get_scale()  # gradients scaled by hand
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


EDITS = {
    "an element": lambda w: w.grad.__setitem__(0, math.nan),
    "divided by a norm of zero": lambda w: w.grad.mul_(0).div_(w.grad.norm()),
    "exchanged": lambda w: setattr(w, "grad", torch.full_like(w, math.inf)),
    "a view": lambda w: w.grad.view(-1)[:1].fill_(math.inf),
    "by optimizer groups": lambda w: torch._foreach_mul_([w.grad], math.inf),
}


@both_paths
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["unscale_", "clip_grad_norm_", "skip=all"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_gradient_edited_after_the_look_is_judged_again(device_path, fused, first, edit):
    """Between the look and the step nothing may become a non-finite weight."""
    w, v = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = torch.optim.SGD([w, v], lr=1.0, fused=fused)
    skip = "all" if first == "skip=all" else "each"
    scaler = GradScaler("cpu", names={"w": w, "v": v}, skip=skip)
    scaler._force_device_path = device_path
    scaler.scale((w * 3 + v).sum()).backward()
    if first == "unscale_":
        scaler.unscale_(optimizer)
    elif first == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        scaler.step(optimizer)
    EDITS[edit](w)
    if first != "skip=all":
        scaler.step(optimizer)
    scaler.update()
    assert not scaler.result.stepped
    assert list(scaler.result.culprits) == ["w"]
    assert not w.any()
    assert not v.any()


@both_paths
def test_a_gradient_that_appears_after_the_look_is_judged_too(device_path):
    w, v = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer, scaler = torch.optim.SGD([v, w], lr=1.0), GradScaler("cpu", names={"w": w, "v": v})
    scaler._force_device_path = device_path
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    v.grad = torch.tensor([1.0, math.nan, 1.0])
    scaler.step(optimizer)
    assert (scaler.result.stepped, list(scaler.result.culprits)) == (False, ["v"])
    assert not w.any()
    assert not v.any()


@both_paths
def test_only_what_was_edited_is_read_again(device_path, monkeypatch):
    from gradlift.torch.scaler import on_device, on_host

    read = []
    for module, name in ((on_host, "look"), (on_device, "device_look")):
        original = getattr(module, name)

        def counted(grads, *args, original=original, **kwargs):
            read.append(sum(g.numel() for g in grads))
            return original(grads, *args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    w, v = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([w, v], lr=1.0)
    for edit, expected in (
        (lambda: None, [103]),
        (lambda: w.grad.mul_(0.5), [103, 3]),
        (lambda: torch.nn.utils.clip_grad_norm_([w, v], 1.0), [103, 103]),
    ):
        read.clear()
        scaler = GradScaler("cpu")
        scaler._force_device_path = device_path
        optimizer.zero_grad()
        scaler.scale(w.sum() + v.sum()).backward()
        scaler.unscale_(optimizer)
        edit()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.result.stepped
        assert read == expected
    for clips in (True, False):  # the scaler's own clipping needs no further read
        read.clear()
        scaler = GradScaler("cpu")
        scaler._force_device_path = device_path
        optimizer.zero_grad()
        scaler.scale(w.sum() + v.sum()).backward()
        if clips:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer, max_norm=None if clips else 1.0)
        assert read == [103]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", ["in place", "through .data"])
@pytest.mark.parametrize("size", [3, 40_000])  # gathered with others, and read where it is
def test_a_masters_gradient_edited_after_unscale_is_judged_again(dtype, write, size):
    w = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", names={"w": w}, init_scale=8.0)
    scaler.scale(w.float().sum()).backward()
    scaler.unscale_(optimizer)
    (w.grad if write == "in place" else w.grad.data)[1] = math.nan
    scaler.step(optimizer)
    assert (scaler.result.stepped, list(scaler.result.culprits)) == (False, ["w"])
    assert not w.any()
    assert not optimizer.masters[0].any()


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@both_paths
def test_a_masters_gradient_that_float16_cannot_show_is_no_culprit(device_path):
    """At scale 1/2 a gradient fits as scaled and is inf in `.grad` after unscale_(); the step uses
    it in float32."""
    a, b = (torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD, [a, b], lr=1e-6)
    scaler = GradScaler("cpu", init_scale=0.5, names={"a": a, "b": b})
    scaler._force_device_path = device_path
    for spoilt in (False, True):
        a.grad = torch.full_like(a, 60000.0)
        b.grad = torch.ones_like(b)
        scaler.get_scale()  # gradients scaled by hand
        scaler.unscale_(optimizer)
        assert a.grad.isinf().all()
        if spoilt:
            b.grad[1] = math.nan
        scaler.step(optimizer)
        assert scaler.result.stepped != spoilt
        scaler.update()
    assert scaler.result.culprits == ("b",)


@both_paths
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_every_dtype_in_one_optimizer(device_path, clips, foreach):
    params = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in DTYPES]
    groups = [{"params": [p]} for p in params]
    optimizer, scaler = torch.optim.SGD(groups, lr=0.5, foreach=foreach), GradScaler("cpu")
    scaler._force_device_path = device_path
    scaler.scale(sum(p.float().sum() * 2 for p in params)).backward()
    scaler.step(optimizer, max_norm=3.0 if clips else None)
    scaler.update()
    assert scaler.result.stepped
    if clips:
        assert scaler.result.grad_norm == pytest.approx(6.0)
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.5 if clips else 0.0))
    params[0].grad[1] = math.nan
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.result.stepped
    assert all(p.isfinite().all() for p in params)


@both_paths
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sparse_gradients_beside_dense_ones(device_path, dtype):
    table = torch.nn.Embedding(5, 2, sparse=True, dtype=dtype)
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    before = table.weight.detach().clone()
    optimizer, scaler = torch.optim.SGD([table.weight, w], lr=1.0), GradScaler("cpu")
    scaler._force_device_path = device_path
    for factor, stepped in ((1.0, True), (math.inf, False)):
        optimizer.zero_grad()
        rows = table(torch.tensor([1, 1, 3])).double()
        scaler.scale((rows.sum(0) * 2 + w).sum() * factor).backward()
        scaler.step(optimizer, max_norm=1e6)
        scaler.update()
        assert scaler.result.stepped is stepped
    moved = before - table.weight.detach()
    expected = torch.tensor([0.0, 4.0, 0.0, 2.0, 0.0], dtype=dtype)
    torch.testing.assert_close(moved, expected[:, None].expand(5, 2))


@both_paths
@pytest.mark.parametrize("overflow", [True, False])
def test_zeros_that_were_there_before_are_no_step(device_path, overflow):
    """Every micro-batch dropped, and zero_grad(set_to_none=False): weight decay and momentum would
    move the weights for nothing."""
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._force_device_path = device_path
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    kept = w.detach().clone()
    with scaler.accumulate(drop_bad=True) as window:
        for _ in range(2):
            loss = (w * 1e38).sum() if overflow else w.sum() * math.nan
            scaler.scale(loss).backward()
    assert window.dropped == [0, 1]
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(w.detach(), kept)
    assert scaler.result.skipped
    assert scaler.result.cause is (Cause.OVERFLOW if overflow else Cause.LOSS_NONFINITE)
    assert scaler.skipped_steps == 1
    assert scaler.get_scale() == (2.0 if overflow else 4.0)


class HalfWay(torch.optim.SGD):
    """Runs out of memory in its second group, once."""

    fails = True

    def step(self, closure=None):
        groups = self.param_groups
        if self.fails:
            self.param_groups = groups[:1]
            super().step()
            self.param_groups, self.fails = groups, False
            raise MemoryError("out of memory")
        return super().step()


@both_paths
@pytest.mark.parametrize("first", ["", "unscale_", "clip"])
def test_a_step_that_raises_half_way_is_explained_and_may_be_repeated(device_path, first):
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = HalfWay([{"params": [a]}, {"params": [b]}], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._force_device_path = device_path
    scaler.scale((a + b).sum()).backward()
    if first == "unscale_":
        scaler.unscale_(optimizer)
    if first == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)  # of 2: half of each
    with pytest.raises(MemoryError, match="out of memory") as raised:
        scaler.step(optimizer)
    said = " ".join(raised.value.__notes__)
    assert "HalfWay.step() raised this before it was through. Some weights may have moved" in said
    assert "step() may be called again" in said
    scaler.step(optimizer)
    scaler.update()
    size = 0.5 if first == "clip" else 1.0
    torch.testing.assert_close(a.detach(), torch.full((2,), -2 * size))
    torch.testing.assert_close(b.detach(), torch.full((2,), -size))
    assert (scaler.result.stepped, scaler.get_scale()) == (True, 8.0)


@both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_masters_step_that_raises_leaves_weights_and_masters_in_agreement(dtype, device_path):
    a, b = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2))
    optimizer = MasterWeights(HalfWay([{"params": [a]}, {"params": [b]}], lr=1.0))
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._force_device_path = device_path
    scaler.scale((a + b).float().sum()).backward()
    with pytest.raises(MemoryError) as raised:
        scaler.step(optimizer)
    assert "16-bit weights are what their masters round to" in " ".join(raised.value.__notes__)
    for p, master in zip((a, b), optimizer.masters, strict=True):
        assert torch.equal(p.float(), master)
    assert (a[0].item(), b[0].item()) == (-1.0, 0.0)
    scaler.step(optimizer)
    scaler.update()
    assert (a[0].item(), b[0].item()) == (-2.0, -1.0)


def test_a_search_that_raises_is_undone():
    w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer, scaler = torch.optim.LBFGS([w], lr=0.1), GradScaler("cpu", init_scale=8.0)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("out of memory")
        optimizer.zero_grad()
        loss = (w**4).sum()
        scaler.scale(loss).backward()
        return loss

    before = w.detach().clone()
    with pytest.raises(MemoryError) as raised:
        scaler.step(optimizer, closure)
    assert torch.equal(w.detach(), before)
    assert not optimizer.state
    assert "as they were before" in " ".join(raised.value.__notes__)
    scaler.step(optimizer, closure)
    scaler.update()
    assert scaler.result.stepped
    assert not torch.equal(w.detach(), before)


@both_paths
def test_every_look_at_a_changed_gradient_can_name_it(device_path):
    """A gradient that was NaN when it was looked at again, and is finite when it is looked at a
    third time: the step is lost, and its parameter is named."""
    w, optimizer, scaler = made(device_path, False, size=4, init_scale=2.0)
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    w.grad[1] = math.nan
    scaler.unscale_(optimizer)  # a second look
    w.grad[:] = 1.0
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.result.stepped
    assert len(scaler.result.culprits) == 1
    assert not w.any()

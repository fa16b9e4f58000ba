"""GradScaler as stories: what goes wrong in real runs, and what must come of it."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torchao
from torch.distributed.optim import _apply_optimizer_in_backward

import gradlift.torch
from gradlift import Cause, Journal, Verdict, read_journal, replay
from gradlift.errors import GradliftError, MisuseError, SettingsError, TrainingHalted
from gradlift.torch import GradScaler


def net(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def bits(model):
    return [p.detach().clone().view(torch.int32) for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def half_loss(model, x, times=1.0):
    """A loss through float16 activations, so that gradients overflow as they really do."""
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().square().mean() * times


def train(scaler, model, optimizer, losses, **step):
    results = []
    for loss in losses:
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        scaler.step(optimizer, **step)
        scaler.update()
        results.append(scaler.result)
    return results


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def good(model):
    return half_loss(model, X)


def value(model):
    with torch.no_grad():
        return float(good(model))


def dead(model):
    return half_loss(model, X) * math.nan


def exploding(model):
    return half_loss(model, X, times=1e30)


@pytest.mark.parametrize("fused", [True, False])
def test_200_nan_losses_then_good_data(fused):
    model = net(8, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    before = bits(model)
    results = train(scaler, model, optimizer, [dead] * 200)
    assert {r.cause for r in results} == {Cause.LOSS_NONFINITE}
    assert scaler.get_scale() == 2.0**10
    assert same(before, bits(model))
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


def test_an_initial_scale_of_2_to_the_minus_130():
    with pytest.warns(UserWarning, match="outside"):
        scaler = GradScaler("cpu", init_scale=2.0**-130)
    model = net(8, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(scaler, model, optimizer, [good] * 20)
    assert all(torch.isfinite(p).all() for p in model.parameters())


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


def test_every_16th_loss_is_4096_times_larger():
    model = net(8, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=20)
    losses = [(lambda m, i=i: half_loss(m, X, 4096.0 if i % 16 == 15 else 1.0)) for i in range(200)]
    first = value(model)
    results = train(scaler, model, optimizer, losses, max_norm=1.0)
    skipped = [i for i, r in enumerate(results) if not r.stepped]
    assert skipped
    assert all(i % 16 == 15 or results[i].scale > 2**14 for i in skipped)
    assert value(model) < first / 10


def test_fused_and_unfused_skips_report_alike_and_nothing_else_moves():
    told = []
    for fused in (True, False):
        model = net(8, 8, 1)
        ema = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = GradScaler("cpu", init_scale=2.0**12, names=model)
        rows = []
        for loss in (good, exploding, dead, good):
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
    assert result.micro_batch == bad
    assert same(before, bits(model))
    assert scaler.get_scale() == 2.0**7


def test_a_nan_loss_in_a_micro_batch_is_named():
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for loss in (good, dead, good):
        scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    assert (scaler.result.cause, scaler.result.micro_batch) == (Cause.LOSS_NONFINITE, 1)


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
    assert same(before_b, bits(b))
    assert same(before_a, bits(a)) == (skip == "all")
    assert scaler.get_scale() == 2.0**7
    assert scaler.skipped_steps == 1
    for m, optimizer in zip((a, b), opts):
        optimizer.zero_grad()
        scaler.scale(good(m)).backward()
    for optimizer in opts:
        scaler.step(optimizer)
    scaler.update()
    assert not same(before_a, bits(a))
    assert not same(before_b, bits(b))


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


def test_json_round_trip_before_first_use():
    scaler = GradScaler("cpu", init_scale=2.0**9)
    data = json.loads(json.dumps(scaler.state_dict()))
    other = GradScaler("cpu")
    other.load_state_dict(data)
    assert other.state_dict() == data
    assert other.get_scale() == 2.0**9


def test_a_float16_loss_of_shape_1():
    """The scale is cast to float16 in backward: 2^15 is the most that arrives."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu")
    loss = (w * 2.0).half()
    scaled = scaler.scale(loss)
    assert scaled.dtype is torch.float32
    assert scaled.item() == 2.0 * 2**15
    scaled.backward()
    assert w.grad.item() == 2.0 * 2**15
    scaler.step(optimizer)
    assert w.item() == -1.0
    assert "loss computed in float16" in scaler.result.notes[0]
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    plain = torch.ones((1,), dtype=torch.float16, requires_grad=True)
    (plain * torch.tensor(2.0**16)).backward(torch.ones(1, dtype=torch.float16))
    assert plain.grad.isinf().all()  # what torch's scaler would have done


def test_a_float16_loss_of_2_becomes_131072_where_its_scale_allows():
    scaler = GradScaler("cpu", init_scale=2.0**15)
    assert scaler.scale(torch.full((1,), 4.0, dtype=torch.float16)).item() == 131072.0


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


# Retry


class Noisy(torch.nn.Module):
    """Dropout and BatchNorm: random states and buffers that a retry has to put back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.5)
        )
        self.head = torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def noisy_run(init_scale, retries, steps=6, fused=False, journal=None):
    torch.use_deterministic_algorithms(True)
    try:
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = GradScaler("cpu", init_scale=init_scale, journal=journal)
        torch.manual_seed(7)
        np.random.seed(7)
        results = [
            scaler.train_step(
                lambda: half_loss(model, X), optimizer, max_norm=1.0, retries=retries, model=model
            )
            for _ in range(steps)
        ]
        state = [*bits(model), *(b.clone() for b in model.buffers()), torch.get_rng_state()]
        return state, results, scaler
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [True, False])
def test_a_retried_run_equals_one_that_started_at_the_lower_scale(fused):
    high, results, scaler = noisy_run(2.0**24, retries=20, fused=fused)
    assert results[0].retries > 3
    assert all(r.stepped for r in results)
    assert [e.what for e in scaler.events] == ["retry"] * results[0].retries
    low, plain, _ = noisy_run(results[0].scale, retries=0, fused=fused)
    assert all(r.retries == 0 for r in plain)
    assert same(high, low)


def test_the_retry_test_can_fail(monkeypatch):
    monkeypatch.setattr("gradlift.torch.scaler.retrying.Replay.restore", lambda self: None)
    high, results, _ = noisy_run(2.0**24, retries=20)
    low, _, _ = noisy_run(results[0].scale, retries=0)
    assert not same(high, low)


def test_retry_wants_to_know_the_model():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    with pytest.raises(MisuseError, match="retries need model="):
        scaler.train_step(lambda: good(model), optimizer, retries=1)
    assert scaler.train_step(lambda: good(model), optimizer, retries=1, model=False).stepped


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
    assert same(kept, grads)


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
    GradScaler("cpu", allow_fp16_params=True, init_scale=1.0).step(optimizer)
    assert model[1].bias.dtype is torch.float16


def test_gradients_assigned_by_hand_count():
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu", init_scale=4.0)
    w.grad = torch.tensor([2.0])
    scaler.step(optimizer)
    assert w.item() == 0.5
    scaler.update()
    w.grad = torch.tensor([math.inf])
    scaler.step(optimizer)
    assert (scaler.result.stepped, scaler.result.cause) == (False, Cause.UNKNOWN_NONFINITE)


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


# Accumulation


def test_drop_bad_keeps_the_clean_micro_batches():
    plain, dropped = net(8, 1), net(8, 1)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, dropped)]
    scaler = GradScaler("cpu", init_scale=2.0**8)
    with scaler.accumulate(drop_bad=True) as window:
        for loss in (good, exploding, good, dead):
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
    assert same(bits(plain), bits(dropped))


@pytest.mark.parametrize(
    ("loss", "cause"), [(exploding, Cause.OVERFLOW), (dead, Cause.LOSS_NONFINITE)]
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


# Misuse


def test_unscale_twice_is_harmless_unless_something_came_between():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(good(model)).backward()
    scaler.unscale_(optimizer)
    once = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    assert same(once, [p.grad for p in model.parameters()])
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
            assert same(before, bits(model)) == (i == 4)
    assert half_loss(model, x).item() < first / 2


def test_cuda_without_cuda_is_disabled_as_torchs_is():
    if torch.cuda.is_available():
        assert GradScaler("cuda").is_enabled()
        return
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler("cuda")
    loss = torch.tensor(1.0)
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}


@pytest.mark.parametrize("setting", ["init_scale", "growth_factor", "backoff_factor"])
def test_a_factor_that_is_no_power_of_two_warns_once(setting):
    value = {"init_scale": 1000.0, "growth_factor": 1.5, "backoff_factor": 0.7}[setting]
    with pytest.warns(UserWarning, match=f"{setting}={value}: not a power of two") as caught:
        GradScaler("cpu", **{setting: value})
    assert len(caught) == 1


# Listening


def test_events_limits_and_warnings():
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = []
    scaler = GradScaler("cpu", max_consecutive_skips=3, on_event=heard.append, names=model)
    before = bits(model)
    with pytest.raises(TrainingHalted, match=r"4 steps in a row were skipped, since step 0.*2\^13"):
        train(scaler, model, optimizer, [exploding] * 9)
    assert same(before, bits(model))
    assert [(e.step, e.what) for e in heard] == [(0, "skip"), (1, "skip"), (2, "skip"), (3, "halt")]
    assert (
        heard[0].detail["culprits"][0].endswith("(inf)") or "nan" in heard[0].detail["culprits"][0]
    )
    assert heard[0].detail["next_scale"] == 2.0**15
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=8.0, on_floor="warn")
    with pytest.warns(UserWarning, match=r"at the smallest scale, 2\^3"):
        train(scaler, model, optimizer, [exploding])


def test_the_last_64_events_are_in_the_state():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    train(scaler, model, optimizer, [exploding] * 70)
    other = GradScaler("cpu")
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert len(other.events) == 64
    assert other.events[-1].step == 69
    assert (other.skipped_steps, other.consecutive_skips) == (70, 70)


@pytest.mark.parametrize("device_path", [False, True])
def test_recording_changes_no_bit_and_the_run_replays(tmp_path, device_path):
    runs = []
    for recorded in (False, True):
        model = net(8, 8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        journal = Journal(tmp_path / "run.jsonl") if recorded else None
        scaler = GradScaler(
            "cpu",
            init_scale=2.0**20,
            growth_interval=5,
            journal=journal,
            names=model,
            every=4,
        )
        scaler._force_device_path = device_path
        losses = [(lambda m, i=i: half_loss(m, X, 2.0 ** (i % 7))) for i in range(40)]
        train(scaler, model, optimizer, losses, max_norm=1.0)
        runs.append(bits(model))
    assert same(*runs)
    run = read_journal(tmp_path / "run.jsonl")
    assert len(run.steps) == (39 if device_path else 40)  # a device tells one step late
    assert run.skipped > 0
    assert run.header["parameters"]["0.weight"] == 64
    assert run.steps[-1].lr == 1e-2
    assert [s.step for s in run.samples] == list(range(0, 40, 4))
    assert 0 <= run.samples[1].parameters["0.weight"]["zero"] <= 1
    again = replay(run, "torch:init_scale=2^20,growth_interval=5")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]
    assert {s.verdict for s in run.steps} == {Verdict.APPLY, Verdict.SKIP}


def test_public_names():
    assert gradlift.torch.__all__ == [
        "GradScaler",
        "MasterWeights",
        "find_scale",
        "half_model",
        "layerwise",
        "probe",
    ]


def test_samples_are_of_the_gradients_as_scaled_even_if_unscaled_by_hand(tmp_path):
    w = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = GradScaler("cpu", init_scale=2.0**10, journal=journal, every=1)
        scaler.scale((w * 2.0).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1e-3)
        scaler.step(optimizer)
        scaler.update()
    (sample,) = read_journal(tmp_path / "run.jsonl").samples
    (shares,) = sample.parameters.values()
    assert shares["exponents"] == {"11": 4}

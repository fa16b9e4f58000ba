"""MasterWeights as stories: what 16-bit weights lose, and what must not be lost."""

import copy
import gc
import io
import math
import pickle

import pytest
import torch
from helpers.torch import both_paths
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlift import Cause, Journal, read_journal, replay
from gradlift.errors import MisuseError, SettingsError, StateError
from gradlift.torch import GradScaler, MasterWeights
from gradlift.torch.gradient_source import PlainGradients, gradients_of
from gradlift.torch.masters.flat_region import PieceByPiece
from gradlift.torch.masters.gradients import MasterGradients, RegionGradients

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Shapes that are large, small, scalar, odd: every way a parameter can be laid out.
SHAPES = [(7, 5), (300, 300), (), (300,), (4, 3, 3, 3), (33000,), (1,)]
ALIGNED = [(16, 4), (320, 300), (64,), (48,), (33024,)]  # no kernel has a remainder of these
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),  # looks at shapes: not elementwise
}


def parameters(shapes=SHAPES, dtype=FP32, seed=0):
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]
    for i, p in enumerate(params):
        if p.dim() == 4:
            params[i] = torch.nn.Parameter(p.detach().to(memory_format=torch.channels_last))
    return params


def masters_of(params):
    return [torch.nn.Parameter(p.detach().to(FP32, copy=True)) for p in params]


def give_gradients(step, *sets, skip=()):
    """The same gradients to each set of parameters, as their dtype can hold them."""
    g = torch.Generator().manual_seed(1000 + step)
    narrowest = min((s[0].dtype for s in sets), key=lambda d: torch.finfo(d).bits)
    for i, members in enumerate(zip(*sets, strict=True)):
        gradient = torch.randn(members[0].shape, generator=g).to(narrowest)
        for p in members:
            p.grad = None if i in skip else gradient.to(p.dtype, copy=True)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def snapshot(optimizer, params):
    """Everything a step could change, as bits."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [p.detach().clone() for p in params], [m.clone() for m in optimizer.masters], state


def assert_unchanged(optimizer, params, before):
    now = snapshot(optimizer, params)
    assert equal(now[0], before[0])
    assert equal(now[1], before[1])
    assert now[2].keys() == before[2].keys()
    for i, entry in before[2].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(now[2][i][key], value), (i, key)


# What it is for


def thousand_updates(optimizer, weight):
    """weight += 1e-3, a thousand times."""
    for _ in range(1000):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()


def test_a_thousand_small_updates_are_lost_without_masters_and_kept_with():
    def weights():
        return torch.nn.Parameter(torch.ones(4096, dtype=BF16))

    lost = weights()
    thousand_updates(torch.optim.SGD([lost], lr=1e-3), lost)
    assert (lost == 1).all()  # 1e-3 is less than half of bfloat16's step at 1.0, 2^-7

    truth = torch.nn.Parameter(torch.ones(4096))
    thousand_updates(torch.optim.SGD([truth], lr=1e-3), truth)
    for update in ("masters", "split"):
        w = weights()
        optimizer = MasterWeights(torch.optim.SGD, [w], lr=1e-3, update=update, fused=False)
        thousand_updates(optimizer, w)
        assert torch.equal(optimizer.masters[0], truth)
        assert torch.equal(w, truth.to(BF16))

    # Each update rounds to 0 or 2^-7 with a variance of 1e-3 * (2^-7 - 1e-3): the deviation of a
    # weight is sqrt(1000 * that) = 0.083, and of the mean of 4096 of them 0.0013.
    w = weights()
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1e-3, update="stochastic")
    thousand_updates(optimizer, w)
    deviation = math.sqrt(1000 * 1e-3 * (2.0**-7 - 1e-3))
    assert abs(w.float().mean() - truth.mean()) < 4 * deviation / 64
    assert abs(w.float().std() / deviation - 1) < 0.1


def test_gradients_that_float16_holds_only_scaled_reach_the_master_exactly():
    w = torch.nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=2.0**20)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    true = torch.tensor([2.0**-30, 3 * 2.0**-30, -(2.0**-26), 0.0])  # below float16's 2^-24
    scaler.scale((w.float() * true).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(optimizer.masters[0], 1 - true * 2.0**20)


# Equality with the plain optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_float32_model_is_stepped_as_by_the_plain_optimizer_to_the_bit(name):
    kind, options = OPTIMIZERS[name]
    ours, plain = parameters(), parameters()
    optimizer = MasterWeights(kind, ours, **options)
    reference = kind(plain, **options)
    for step in range(12):
        give_gradients(step, ours, plain, skip=[(), (0, 3), (1,), (2, 4, 6)][step % 4])
        optimizer.step()
        reference.step()
        assert equal(ours, plain), step
    for p, q in zip(ours, plain, strict=True):
        for key, value in reference.state[q].items():
            assert torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_200_steps_with_groups_frozen_parameters_a_new_group_clipping_and_skips(name):
    kind, options = OPTIMIZERS[name]

    def story(make):
        params, extra = parameters(), parameters([(5, 5), (40,)], seed=7)
        params[3].requires_grad_(False)
        optimizer = make(
            [
                {"params": params[:3], "lr": 0.02},
                {"params": params[3:], "weight_decay": 0.1},
            ]
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=20)
        stepped = []
        for step in range(200):
            if step == 60:
                optimizer.add_param_group({"params": extra, "lr": 0.03})
            if step == 120:
                params[3].requires_grad_(True)
            members = params + (extra if step >= 60 else [])
            optimizer.zero_grad()
            give_gradients(step, members, skip=(0, 5) if step % 7 == 3 else ())
            for i, p in enumerate(members):
                if p.grad is not None:
                    p.grad = None if not p.requires_grad else p.grad * scaler.get_scale()
                    if step % 31 == 30 and i == 1:
                        p.grad[0, 0] = math.inf
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer, max_norm=None if step % 3 == 0 else 5.0)
            scaler.update()
            stepped.append(scaler.result.stepped)
            if scaler.result.stepped:
                schedule.step()
        return params + extra, stepped

    plain, stepped = story(lambda groups: kind(groups, **options))
    ours, stepped_too = story(lambda groups: MasterWeights(kind, groups, **options))
    assert stepped == stepped_too
    assert stepped.count(False) == 6
    assert equal(ours, plain)


def test_float32_norms_are_the_plain_optimizers_to_the_bit():
    shapes = [(64, 33), (33,), (7, 5), (50, 50), (3,), (300, 300)]
    ours, plain = parameters(shapes), parameters(shapes)
    optimizer = MasterWeights(torch.optim.SGD, [{"params": ours[:2]}, {"params": ours[2:]}], lr=0.1)
    reference = torch.optim.SGD([{"params": plain[:2]}, {"params": plain[2:]}], lr=0.1)
    for step in range(100):
        give_gradients(step, ours, plain, skip=(step % 6,))
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.get_scale()  # gradients scaled by hand
        norms = [scaler.clip_grad_norm_(o, 1.0) for o in (optimizer, reference)]
        assert torch.equal(*norms)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_fused_steps_are_equal_where_the_kernel_has_no_remainder(kind, dtype):
    """torch's fused CPU kernels round a tensor's last elements, past a multiple of the vector's
    length, differently; a flat buffer has its end elsewhere."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    ours = parameters(ALIGNED, dtype)
    plain = masters_of(ours)
    optimizer = MasterWeights(kind, ours, lr=1e-2, fused=True, **options)
    reference = kind(plain, lr=1e-2, fused=True, **options)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler_too = GradScaler("cpu", init_scale=4.0)
    for step in range(10):
        give_gradients(step, ours, plain, skip=(0, 2) if step == 4 else ())
        for each, o in ((scaler, optimizer), (scaler_too, reference)):
            each.get_scale()  # gradients scaled by hand
            each.step(o, max_norm=3.0)
        scaler.update()
        scaler_too.update()
        assert equal(optimizer.masters, plain), step
        assert equal(ours, [p.to(dtype) for p in plain])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("update", ["masters", "split"])
def test_16_bit_weights_are_stepped_as_float32_ones(name, dtype, update):
    if dtype is FP16 and update == "split":
        return
    kind, options = OPTIMIZERS[name]
    if kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        options = {**options, "fused": False}
    ours = parameters(dtype=dtype)
    plain = masters_of(ours)
    optimizer = MasterWeights(kind, ours, update=update, **options)
    reference = kind(plain, **options)
    for step in range(8):
        give_gradients(step, ours, plain, skip=(0, 3, 6) if step in (2, 5) else ())
        optimizer.step()
        reference.step()
        assert equal(optimizer.masters, plain), step
    for p, w in zip(plain, ours, strict=True):
        halfway = (p.detach().view(torch.int32) & 0xFFFF) == 0x8000
        assert (torch.eq(p.to(dtype), w) | halfway).all()


def test_split_is_the_master_bit_by_bit_and_rounds_ties_away():
    bits = torch.cat(
        [
            torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32),
            torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0, -(2**31), 0x7F7F7FFF, 1]),
        ]
    ).to(torch.int32)
    values = bits.view(FP32)
    values = values[values.to(BF16).isfinite()]
    w = torch.nn.Parameter(torch.zeros(values.numel(), dtype=BF16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.0, update="split")
    optimizer.refresh([values])
    assert torch.equal(optimizer.masters[0].view(torch.int32), values.view(torch.int32))
    nearest = values.to(BF16)
    halfway = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(w[~halfway].view(torch.int16), nearest[~halfway].view(torch.int16))
    assert (w[halfway].float().abs() > values[halfway].abs()).all()


def test_stochastic_rounding_takes_a_neighbour_and_repeats_with_its_seed():
    def run(seed):
        w = parameters([(5000,)], BF16)[0]
        optimizer = MasterWeights(torch.optim.SGD, [w], lr=1e-4, update="stochastic", seed=seed)
        for step in range(3):
            before = w.detach().clone()
            give_gradients(step, [w])
            target = before.float() - 1e-4 * w.grad.float()
            optimizer.step()
            gap = (w.detach().float() - target).abs()
            ulp = torch.maximum(w.detach().float().abs(), target.abs()) * 2.0**-7
            assert (gap <= ulp).all()
        return w.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_stochastic_rounding_draws_anew_in_every_step():
    """An eighth of a bit in each of 32 steps: all weights get ahead, and not one in eight."""
    w = torch.nn.Parameter(torch.ones(4096, dtype=BF16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=2.0**-10, update="stochastic", seed=1)
    for _ in range(32):
        w.grad = -torch.ones_like(w)
        optimizer.step()
    assert (w > 1).float().mean() > 0.95  # 1 - (7/8)^32 = 0.986
    assert float(w.detach().float().mean()) == pytest.approx(1 + 2.0**-5, rel=2.0**-10)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_lbfgs_searches_with_masters(dtype):
    ours = [torch.nn.Parameter(torch.tensor([1.0, -2.0]).to(dtype))]
    plain = masters_of(ours)

    def closure(optimizer, params):
        def evaluate():
            optimizer.zero_grad()
            loss = ((params[0].float() - torch.tensor([0.25, 0.5])) ** 2).sum()
            loss.backward()
            return loss

        return evaluate

    optimizer = MasterWeights(torch.optim.LBFGS, ours, lr=0.1, max_iter=4)
    reference = torch.optim.LBFGS(plain, lr=0.1, max_iter=4)
    for _ in range(4):
        optimizer.step(closure(optimizer, ours))
        reference.step(closure(reference, plain))
    tolerance = 0 if dtype is FP32 else 2e-3  # float16 weights are rounded between evaluations
    assert (optimizer.masters[0] - plain[0]).abs().max() <= tolerance
    assert torch.equal(ours[0], optimizer.masters[0].to(dtype))


def test_lbfgs_under_a_scaler_puts_weights_back_after_an_overflow():
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=FP16))
    optimizer = MasterWeights(torch.optim.LBFGS, [w], lr=0.1, max_iter=4)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    bad = False

    def closure():
        optimizer.zero_grad()
        loss = (w.float() ** 2).sum() * (1e38 if bad else 1.0)
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert scaler.result.stepped
    assert float(w.detach().float().square().sum()) < 5.0
    before = snapshot(optimizer, [w])
    bad = True
    scaler.step(optimizer, closure)
    scaler.update()
    assert not scaler.result.stepped
    assert torch.equal(w, before[0][0])
    assert torch.equal(optimizer.masters[0], before[1][0])
    bad = False
    scaler.step(optimizer, closure)
    assert scaler.result.stepped


# Gradients, whoever touches them


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_whatever_is_done_to_grad_the_step_uses_what_is_there(dtype):
    ours = parameters(dtype=dtype)
    plain = masters_of(ours)
    optimizer = MasterWeights(torch.optim.AdamW, ours, lr=1e-2, fused=False)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    holder = torch.nn.ParameterList(ours)

    def twice(step):
        give_gradients(step, ours, plain)
        for p in (*ours, *plain):
            p.grad.mul_(2)

    def replaced(step):
        give_gradients(step, ours, plain)
        for p in (*ours, *plain):
            p.grad = p.grad.clone() * 4

    def some_none(step):
        give_gradients(step, ours, plain)
        ours[0].grad = plain[0].grad = ours[5].grad = plain[5].grad = None

    def expanded(step):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.ones((), dtype=dtype).expand(a.shape)
            b.grad = torch.ones(b.shape)

    for step, change in enumerate([twice, replaced, some_none, expanded] * 2):
        [holder.zero_grad, optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)][
            step % 3
        ]()
        change(step)
        optimizer.step()
        reference.step()
        assert equal(optimizer.masters, plain), change


def test_accumulated_gradients_are_the_sum():
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    for x in (1.0, 2.0, 4.0):
        (w * x).sum().backward()
    optimizer.step()
    assert torch.equal(w, torch.full((3,), -7.0))


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_unscale_shows_true_gradients_and_clipping_by_hand_counts(dtype):
    def made():
        w = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale((w.float() * torch.tensor([3.0, 4.0])).sum()).backward()
        scaler.unscale_(optimizer)
        return w, optimizer, scaler

    w, optimizer, scaler = made()
    assert w.grad.tolist() == [3.0, 4.0]
    assert optimizer.masters[0].grad.tolist() == [3.0, 4.0]
    assert scaler.clip_grad_norm_(optimizer, 2.5).item() == 5.0
    scaler.step(optimizer)
    assert torch.allclose(optimizer.masters[0], torch.tensor([-1.5, -2.0]), atol=1e-6)

    for clipped in ("model", "masters"):
        w, optimizer, scaler = made()
        chosen = [w] if clipped == "model" else optimizer.masters
        torch.nn.utils.clip_grad_norm_(chosen, 2.5)
        scaler.step(optimizer)
        assert torch.allclose(optimizer.masters[0], torch.tensor([-1.5, -2.0]), atol=1e-3)

    w, optimizer, scaler = made()
    w.grad = torch.tensor([1.0, 0.0], dtype=dtype)  # exchanged after unscale_: this one counts
    scaler.step(optimizer)
    assert optimizer.masters[0].tolist() == [-1.0, 0.0]

    w, optimizer, scaler = made()
    w.grad = None
    scaler.step(optimizer)
    assert optimizer.masters[0].tolist() == [0.0, 0.0]


def test_unscaled_float16_gradients_keep_what_float16_cannot_hold():
    w = torch.nn.Parameter(torch.zeros(1, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=2.0**30)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((w.float() * 2.0**-30).sum()).backward()
    scaler.unscale_(optimizer)
    assert w.grad.item() == 0.0  # it cannot be shown ...
    scaler.step(optimizer)
    assert optimizer.masters[0].item() == -1.0  # ... but it counts


def test_clipping_by_hand_that_clips_nothing_loses_nothing():
    w = torch.nn.Parameter(torch.zeros(2, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=2.0**30)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((w.float() * 2.0**-30).sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    assert optimizer.masters[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_gradients_changed_through_data_after_unscale_count_for_norm_and_step(dtype):
    w = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((w.float() * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.unscale_(optimizer)
    w.grad.data.mul_(0.5)
    scaler.step(optimizer, max_norm=5.0)
    assert scaler.result.grad_norm == 25.0
    assert torch.allclose(optimizer.masters[0], torch.tensor([-3.0, -4.0]), atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_unusual_gradients_can_be_unscaled(dtype):
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 40_000)]
    optimizer = MasterWeights(
        torch.optim.SGD, [{"params": params}, {"params": parameters([(2, 2)])}], lr=1.0
    )
    scaler = GradScaler("cpu", init_scale=2.0)
    for p in params:
        p.grad = torch.ones((), dtype=dtype).expand(p.shape)
    scaler.get_scale()  # gradients scaled by hand
    scaler.unscale_(optimizer)  # and the second group has none
    scaler.step(optimizer)
    scaler.update()
    assert all((p == -0.5).all() for p in params)
    scaler.scale(sum((p.float() ** 2).sum() for p in params)).backward(create_graph=True)
    scaler.step(optimizer)
    assert scaler.result.stepped


def test_wide_gradients_of_narrow_parameters_do_not_overflow():
    w = torch.nn.Parameter(torch.ones(3, dtype=FP16))
    w.grad_dtype = None
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1e-6)
    w.grad = torch.full((3,), 1e5)
    optimizer.step()
    assert torch.allclose(optimizer.masters[0], torch.full((3,), 0.9))


def test_the_first_step_of_fused_momentum_may_be_skipped():
    w = torch.nn.Parameter(torch.ones(64, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False):
        scaler.scale(torch.zeros(()))
        w.grad = torch.full((64,), math.inf if bad else 4.0, dtype=FP16)
        scaler.step(optimizer)
        scaler.update(new_scale=4.0)
    assert (w == 0.5).all()


def test_split_weights_do_not_move_in_a_skipped_step():
    params = parameters([(30_000,)], BF16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-3, update="split")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for step in range(5):
        scaler.scale(torch.zeros(()))
        give_gradients(step, params)
        if step % 2:
            before = snapshot(optimizer, params)
            params[0].grad[3] = math.inf
        scaler.step(optimizer)
        scaler.update(new_scale=1.0)
        if step % 2:
            assert_unchanged(optimizer, params, before)


def test_a_gradient_changed_before_a_step_that_was_put_off_counts():
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=1.0, skip="all")
    w.grad = torch.tensor([3.0, 4.0])
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer)
    w.grad.mul_(0)
    scaler.update()
    assert w.tolist() == [0.0, 0.0]


def test_a_gradient_changed_between_clip_and_step_counts():
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    w.grad = torch.tensor([3.0, 4.0])
    scaler.get_scale()  # gradients scaled by hand
    scaler.clip_grad_norm_(optimizer, 100.0)
    w.grad.mul_(0)
    scaler.step(optimizer)
    assert w.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_nothing_and_names_the_culprit(dtype, fused, device_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.Linear(200, 300)).to(dtype)
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._force_device_path = device_path
    params = list(model.parameters())
    for step in range(3):
        scaler.scale(torch.zeros(()))
        give_gradients(step, params)
        if step == 2:
            before = snapshot(optimizer, params)
            params[2].grad[7, 7] = math.inf
        scaler.step(optimizer, max_norm=1.0)
        result = scaler.result
        assert result.stepped == (step < 2)
        scaler.update()
    assert result.cause is Cause.OVERFLOW
    assert list(result.culprits) == ["1.weight"]
    assert_unchanged(optimizer, params, before)
    assert scaler.get_scale() == 2.0


def test_the_device_path_steps_like_the_cpu_path():
    runs = []
    for device_path in (False, True):
        params = parameters(dtype=FP16)
        optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
        scaler = GradScaler("cpu", init_scale=2.0**6)
        scaler._force_device_path = device_path
        for step in range(5):
            scaler.scale(torch.zeros(()))
            give_gradients(step, params, skip=(0, 3) if step == 2 else ())
            for p in params:
                if p.grad is not None:
                    p.grad *= 64
            scaler.step(optimizer, max_norm=2.0)
            scaler.update()
        runs.append(optimizer.masters)
    for a, b in zip(*runs, strict=True):  # the norm is added up in another order
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_journal_samples_every_parameter(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).to(FP16)
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = GradScaler("cpu", journal=journal, every=1, names=model)
        for step in range(2):
            scaler.scale(torch.ones(()))
            give_gradients(step, list(model.parameters()))
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    run = read_journal(tmp_path / "run.jsonl")
    assert set(run.samples[1].parameters) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert run.header["parameters"] == {"0.weight": 32, "0.bias": 8, "1.weight": 16, "1.bias": 2}
    assert run.steps[1].norm > 0


def test_no_gradient_at_all_is_no_step():
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1.0)
    scaler = GradScaler("cpu")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.result.cause is Cause.NO_GRADIENTS
    optimizer.step()
    assert equal(params, parameters(dtype=FP16))


def test_retries_find_a_scale_for_float16_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = model.to(FP16)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=2.0**30)
    x = torch.randn(16, 8, dtype=FP16)
    losses = []

    def closure():
        loss = (model(x).float() - 1).square().mean()
        losses.append(float(loss))
        return loss

    result = scaler.train_step(closure, optimizer, retries=40, model=model, max_norm=1.0)
    assert result.stepped
    assert result.retries > 5
    for _ in range(30):
        assert scaler.train_step(closure, optimizer, max_norm=1.0).stepped
    assert losses[-1] < 0.5 * losses[0]


def test_a_bad_micro_batch_is_left_out():
    w = torch.nn.Parameter(torch.zeros(2, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    with scaler.accumulate(drop_bad=True):
        for x in (1.0, 1e6, 2.0):
            scaler.scale((w.float() * x).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.masters[0].tolist() == [-3.0, -3.0]


def test_torchs_own_scaler_works_with_it():
    params = parameters(ALIGNED, FP16)
    plain = masters_of(params)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    reference = torch.optim.AdamW(plain, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        scaler.scale(torch.zeros(()))
        give_gradients(step, params, plain)
        for p in params:
            p.grad *= 8
        if step == 2:
            params[0].grad[0, 0] = math.inf
        else:
            reference.step()
        scaler.step(optimizer)
        scaler.update(new_scale=8.0)
    assert equal(optimizer.masters, plain)


def test_a_number_of_two_to_the_120_is_taken_out_in_two_steps():
    w = torch.nn.Parameter(torch.zeros(2, dtype=BF16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**126)
    w.grad = torch.tensor([2.0**126, 2.0**125], dtype=BF16)
    scaler.get_scale()  # gradients scaled by hand
    scaler.step(optimizer, max_norm=2.0**-10)
    scaler.update()
    norm = math.hypot(1.0, 0.5)
    truth = -torch.tensor([1.0, 0.5]) * 2.0**-10 / norm
    assert torch.allclose(optimizer.masters[0], truth, rtol=1e-5)


# An optimizer like any other


def test_it_is_an_optimizer_to_schedulers_hooks_and_groups():
    params = parameters(dtype=BF16)
    optimizer = MasterWeights(
        torch.optim.SGD, [{"params": params[:2], "lr": 1.0}, {"params": params[2:]}], lr=0.5
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.5]
    assert optimizer.param_groups[0]["params"] == params[:2]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)
    called = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append(o))
    optimizer.register_step_post_hook(lambda o, args, kwargs: called.append("after"))
    before = [p.detach().clone() for p in params]
    give_gradients(0, params)
    optimizer.step()
    assert called == [optimizer, "after"]
    assert equal(params, before)  # lr 0: the scheduler's word counts
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.step()
    assert not equal(params, before)
    schedule.step()
    assert "lr" in repr(optimizer)


def test_a_hook_that_changes_gradients_is_obeyed_under_a_scaler():
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)

    def erase(optimizer, args, kwargs):
        w.grad.zero_()

    optimizer.register_step_pre_hook(erase)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    assert w.tolist() == [0.0, 0.0]


def test_an_existing_optimizer_is_taken_over_with_its_state_and_scheduler():
    ours, plain = parameters(), parameters()
    existing = torch.optim.AdamW(ours, lr=1e-2)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (existing, reference)]
    for step in range(3):
        give_gradients(step, ours, plain)
        existing.step()
        reference.step()
    optimizer = MasterWeights(existing)
    for step in range(3, 6):
        give_gradients(step, ours, plain)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert equal(ours, plain)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_hooks_for_all_optimizers_are_called_once_and_those_of_an_existing_one_stay():
    w = torch.nn.Parameter(torch.ones(2, dtype=BF16))
    existing = torch.optim.SGD([w], lr=1.0)
    called = []
    existing.register_step_post_hook(lambda o, args, kwargs: called.append(o))
    optimizer = MasterWeights(existing)
    handle = register_optimizer_step_pre_hook(lambda o, args, kwargs: called.append("all"))
    try:
        w.grad = torch.ones_like(w)
        optimizer.step()
    finally:
        handle.remove()
    assert called == ["all", optimizer]


def test_parameters_added_beside_the_groups_are_an_error():
    a, b = (torch.nn.Parameter(torch.ones(2, dtype=BF16)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD, [a], lr=1.0)
    optimizer.param_groups[0]["params"].append(b)
    with pytest.raises(MisuseError, match="add_param_group"):
        optimizer.step()

    big = torch.nn.Linear(300, 300, bias=False)
    optimizer = MasterWeights(torch.optim.SGD, big.parameters(), lr=1.0)
    big.half()
    give_gradients(0, list(big.parameters()))
    with pytest.raises(MisuseError, match=r"weight is now torch\.float16.*first"):
        optimizer.step()

    class Sharp(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.base = torch.optim.SGD(self.param_groups, lr=lr)

        def step(self, closure=None):
            self.base.step()

    with pytest.raises(SettingsError, match="Sharp keeps parameters in its attribute 'base'"):
        MasterWeights(Sharp, [a], lr=0.1)


def test_an_optimizer_with_state_of_its_own_kind():
    class Counting(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.state["all"] = {"n": 0}

        @torch.no_grad()
        def step(self, closure=None):
            self.state["all"]["n"] += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                        p -= group["lr"] * p.grad

    params = parameters(dtype=FP16)
    plain = masters_of(params)
    optimizer, reference = MasterWeights(Counting, params, lr=0.1), Counting(plain, lr=0.1)
    for step in range(3):
        give_gradients(step, params, plain)
        optimizer.step()
        reference.step()
    assert equal(optimizer.masters, plain)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["all"] == {"n": 3}
    assert saved["state"][0]["seen"] == 3
    optimizer.load_state_dict(saved)
    give_gradients(3, params, plain)
    optimizer.step()
    reference.step()
    assert equal(optimizer.masters, plain)


def test_momentum_switched_on_in_mid_run():
    ours, plain = parameters(), parameters()
    optimizer = MasterWeights(torch.optim.SGD, ours, lr=0.1)
    reference = torch.optim.SGD(plain, lr=0.1)
    for step in range(8):
        if step == 3:
            optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = 0.9
        give_gradients(step, ours, plain, skip=(0, 3) if step == 5 else ())
        optimizer.step()
        reference.step()
        assert equal(ours, plain), step
    for p, q in zip(ours, plain, strict=True):
        buffer = reference.state[q]["momentum_buffer"]
        assert torch.equal(optimizer.state[p]["momentum_buffer"], buffer)


def test_state_can_be_cleared_and_given_anew():
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    assert params[0] not in optimizer.state
    give_gradients(0, params)
    optimizer.step()
    assert params[0] in optimizer.state
    masters = [m.clone() for m in optimizer.masters]
    kept = {p: dict(optimizer.state[p]) for p in params}
    kept = copy.deepcopy(list(kept.values()))
    optimizer.state.clear()
    assert not optimizer.state
    assert equal(optimizer.masters, masters)
    optimizer.state = dict(zip(params, kept, strict=True))
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], kept[1]["exp_avg"])


def test_frozen_parameters_cost_nothing_until_they_thaw():
    base, adapter = parameters([(100, 100)], FP16), parameters([(10, 10)], BF16)
    base[0].requires_grad_(False)
    optimizer = MasterWeights(torch.optim.AdamW, [*base, *adapter], lr=1e-2)
    assert len(optimizer._home) == 1
    give_gradients(0, adapter)
    optimizer.step()
    assert torch.equal(base[0], parameters([(100, 100)], FP16)[0])
    base[0].requires_grad_(True)
    give_gradients(1, base)
    optimizer.step()
    assert len(optimizer._home) == 2
    assert not torch.equal(base[0], parameters([(100, 100)], FP16)[0])
    assert optimizer.state[base[0]]["step"] == 1
    assert optimizer.state[adapter[0]]["step"] == 2


@pytest.mark.parametrize("way", ["copied", "saved"])
def test_a_parameter_that_is_frozen_keeps_its_master_and_its_state(way):
    ours = parameters(dtype=FP16)
    plain = masters_of(ours)
    options = {"lr": 1e-2, "fused": False}
    optimizer, reference = (f(ps) for f, ps in ((of(options), ours), (plain_of(options), plain)))
    for step in range(3):
        give_gradients(step, ours, plain)
        optimizer.step()
        reference.step()
    for i in (0, 1):
        ours[i].requires_grad_(False)
    if way == "copied":
        ours, optimizer = copy.deepcopy((ours, optimizer))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        ours = [torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in ours]
        optimizer = of(options)(ours)
        optimizer.load_state_dict(saved)
    for i in (0, 1):
        ours[i].requires_grad_(True)
    for step in range(3, 6):
        give_gradients(step, ours, plain)
        optimizer.step()
        reference.step()
    assert equal(optimizer.masters, plain)


def of(options):
    return lambda params: MasterWeights(torch.optim.AdamW, params, **options)


def plain_of(options):
    return lambda params: torch.optim.AdamW(params, **options)


def test_how_a_step_is_computed_is_not_taken_from_a_checkpoint():
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    plain = torch.optim.AdamW(masters_of(params), lr=5e-3)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["lr"] == 5e-3


def test_a_step_counts_as_one_change_of_a_weight():
    """More would mean that our own writes look like the user's, and are checked each time."""
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    for step in range(3):
        give_gradients(step, params)
        before = [p._version for p in params]
        optimizer.step()
        assert [p._version for p in params] == [v + 1 for v in before]


def test_names_and_state_by_parameter():
    model = torch.nn.Linear(3, 2).to(BF16)
    optimizer = MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-2)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert not optimizer.state
    give_gradients(0, list(model.parameters()))
    optimizer.step()
    assert set(optimizer.state) == {model.weight, model.bias}
    entry = optimizer.state[model.weight]
    assert entry["exp_avg"].shape == (2, 3)
    assert {v.dtype for v in entry.values()} == {FP32}
    optimizer.state[model.weight]["exp_avg"].zero_()  # a view: this changes the state itself
    assert not optimizer.state[model.weight]["exp_avg"].any()
    optimizer.state[model.bias] = {**optimizer.state[model.bias], "exp_avg": torch.ones(2)}
    assert optimizer.state[model.bias]["exp_avg"].tolist() == [1.0, 1.0]
    for p, entry in optimizer.state.items():  # as trainers do to move state to a device
        optimizer.state[p] = {k: v.to("cpu") for k, v in entry.items()}
    assert optimizer.state[model.bias]["exp_avg"].tolist() == [1.0, 1.0]


# Checkpoints

UPDATES = [(FP32, "masters"), (FP16, "masters"), (BF16, "masters"), (BF16, "split")]
UPDATES += [(BF16, "stochastic")]


@pytest.mark.parametrize(("dtype", "update"), UPDATES)
@pytest.mark.parametrize("name", ["sgd", "plain sgd", "adamw", "asgd", "adafactor"])
@pytest.mark.parametrize("way", ["saved", "opt first", "deepcopy", "pickle", "torch.save"])
def test_resumed_training_is_bit_equal(dtype, update, name, way):
    kind, options = OPTIMIZERS[name]
    holder = torch.nn.ParameterList(parameters(dtype=dtype))
    optimizer = MasterWeights(kind, holder, update=update, **options)
    for step in range(4):
        give_gradients(step, list(holder), skip=(0, 3) if step == 1 else ())
        optimizer.step()
    if way in ("saved", "opt first"):
        file = io.BytesIO()
        torch.save({"model": holder.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        other = torch.nn.ParameterList(parameters(dtype=dtype, seed=5))
        twin = MasterWeights(kind, other, update=update, **options)
        loads = [
            lambda: other.load_state_dict(loaded["model"]),
            lambda: twin.load_state_dict(loaded["optimizer"]),
        ]
        for load in loads if way == "saved" else reversed(loads):
            load()
    elif way == "deepcopy":
        other, twin = copy.deepcopy((holder, optimizer))
    elif way == "pickle":
        other, twin = pickle.loads(pickle.dumps((holder, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((holder, optimizer), file)
        file.seek(0)
        other, twin = torch.load(file, weights_only=False)
    for step in range(4, 8):
        give_gradients(step, list(holder), list(other), skip=(2, 5) if step == 6 else ())
        optimizer.step()
        twin.step()
    assert equal(holder, other)
    assert equal(optimizer.masters, twin.masters)


@pytest.mark.parametrize("name", ["sgd", "plain sgd", "adam", "adamw", "asgd", "adafactor"])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_checkpoints_go_to_the_plain_optimizer_and_back(name, dtype):
    kind, options = OPTIMIZERS[name]
    if kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        options = {**options, "fused": False}
    params = parameters(dtype=dtype)
    optimizer = MasterWeights(kind, params, **options)
    for step in range(3):
        give_gradients(step, params, skip=(0, 3) if step < 2 else ())
        optimizer.step()

    plain = [torch.nn.Parameter(m.detach().clone()) for m in optimizer.masters]
    reference = kind(plain, **options)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = MasterWeights(kind, back, **options)
    again.refresh(plain)
    state = copy.deepcopy(reference.state_dict())
    for entry in state["state"].values():
        entry.pop("master", None)  # a plain optimizer's own checkpoint has none
    again.load_state_dict(state)
    for step in range(3, 6):
        give_gradients(step, params, plain, back, skip=(1,) if step == 4 else ())
        for each in (optimizer, reference, again):
            each.step()
    assert equal(optimizer.masters, plain)
    assert equal(again.masters, plain)
    assert equal(params, back)


@pytest.mark.parametrize("source", ["masters", "split", "stochastic"])
@pytest.mark.parametrize("target", ["masters", "split", "stochastic"])
def test_a_checkpoint_of_one_update_loads_into_another(source, target):
    params = parameters(dtype=BF16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-3, update=source)
    for step in range(3):
        give_gradients(step, params)
        optimizer.step()
    twin_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    twin = MasterWeights(torch.optim.AdamW, twin_params, lr=1e-3, update=target)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if source in ("masters", "split") and target in ("masters", "split"):
        assert equal(twin.masters, optimizer.masters)
    for a, b in zip(twin.masters, optimizer.masters, strict=True):
        assert torch.allclose(a, b, rtol=2.0**-7)
    assert torch.equal(twin.state[twin_params[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg"])
    give_gradients(9, twin_params)
    twin.step()


def test_damaged_state_is_refused_and_changes_nothing():
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    give_gradients(0, params)
    optimizer.step()
    before = snapshot(optimizer, params)
    good = copy.deepcopy(optimizer.state_dict())

    def damaged(change):
        state = copy.deepcopy(good)
        change(state)
        return state

    cases = {
        r"exp_avg.*\(7, 5\)": lambda s: s["state"][0].update(exp_avg=torch.zeros(3, 3)),
        r"exp_avg.*None": lambda s: s["state"][0].update(exp_avg=None),
        r"only \['exp_avg_sq', 'step'\]": lambda s: s["state"][0].pop("exp_avg"),
        r"step.*one number": lambda s: s["state"][0].update(step=torch.zeros(7, 5)),
        r"master.*expected the shape": lambda s: s["state"][0].update(master="x"),
        r"TypeError": lambda s: s["state"].update({0: [1]}),
        r"master.*shape": lambda s: s["state"][1].update(master=torch.zeros(2)),
        "cannot be loaded": lambda s: s["param_groups"].append({"params": []}),
        "loaded": lambda s: s.pop("state"),
        "schema": lambda s: s.update(gradlift={"schema": 99}),
        "noise": lambda s: s.update(gradlift={"schema": 1, "noise": {"seed": "x"}}),
        "damaged": lambda s: s.update(gradlift={"schema": 1, "apart": {0: 3}}),
    }
    for message, change in cases.items():
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(damaged(change))
        assert_unchanged(optimizer, params, before)
    optimizer.load_state_dict(good)


def test_state_dict_hooks_are_called():
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.SGD, params, lr=1e-2)
    seen = []
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loading", optimizer]


# Model and masters


def test_drift_is_an_error_and_refresh_takes_the_models_word():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 200, bias=False))
    model.to(FP16)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5)
    params = list(model.parameters())
    changes = {
        "load_state_dict": lambda: model.load_state_dict(
            {k: v + 1 for k, v in model.state_dict().items()}
        ),
        "through .data": lambda: [p.data.add_(1) for p in params],
        "one element": lambda: params[2].__setitem__((3, 1), 9.0),
        "another tensor": lambda: setattr(params[0], "data", params[0].data + 1),
    }
    for name, change in changes.items():
        with torch.no_grad():
            change()
        give_gradients(0, params)
        before = [p.detach().clone() for p in params]
        with pytest.raises(MisuseError, match=r"(0|1)\.(weight|bias).*refresh\(\)"):
            optimizer.step()
        assert equal(params, before), name
        optimizer.refresh()
        optimizer.step()
        truth = [b.float() - 0.5 * p.grad.float() for b, p in zip(before, params, strict=True)]
        assert equal(optimizer.masters, truth), name
    model.load_state_dict(model.state_dict())  # the same values: nothing has drifted
    optimizer.step()
    params[0].data = params[0].data.clone()
    optimizer.step()
    assert equal(params, [m.to(FP16) for m in optimizer.masters])


def test_a_float32_parameter_given_other_memory_is_followed():
    ours, plain = parameters(), parameters()
    optimizer = MasterWeights(torch.optim.AdamW, ours, lr=1e-2)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    for step in range(4):
        give_gradients(step, ours, plain)
        for p in (*ours, *plain):
            p.data = p.data * 2
        optimizer.step()
        reference.step()
        assert equal(ours, plain)


def test_a_parameter_of_another_dtype_than_it_was_is_an_error():
    model = torch.nn.Linear(3, 3)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    model.half()
    give_gradients(0, list(model.parameters()))
    with pytest.raises(MisuseError, match=r"float16.*float32.*first"):
        optimizer.step()


def test_refresh_checks_what_it_is_given():
    params = parameters(dtype=BF16)
    optimizer = MasterWeights(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(StateError, match="1 weights for 7"):
        optimizer.refresh([torch.zeros(3)])
    with pytest.raises(StateError, match=r"\(3,\)"):
        optimizer.refresh([torch.zeros(3)] * 7)
    exact = [p.detach().float() * 1.001 for p in params]
    optimizer.refresh(exact)
    assert equal(optimizer.masters, exact)
    assert equal(params, [e.to(BF16) for e in exact])


def test_weights_above_kept_lower_bits_are_not_exchanged_unnoticed():
    w = torch.nn.Parameter(torch.full((4,), 1000.0, dtype=BF16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0, update="split")
    optimizer.refresh()
    w.grad = torch.full((4,), 1.5, dtype=BF16)
    optimizer.step()
    with torch.no_grad():
        w.fill_(0.001)
    w.grad = torch.zeros_like(w)
    with pytest.raises(MisuseError, match=r"refresh\(\)"):
        optimizer.step()
    optimizer.refresh()
    optimizer.step()
    assert torch.equal(w, torch.full((4,), 0.001, dtype=BF16))


def test_a_plain_checkpoint_does_not_hide_that_the_model_has_changed():
    w = torch.nn.Parameter(torch.ones(8, dtype=FP16))
    optimizer = MasterWeights(torch.optim.Adam, [w], lr=1e-3)
    plain = torch.optim.Adam([torch.nn.Parameter(torch.ones(8))], lr=1e-3)
    with torch.no_grad():
        w[3] = 5.0
    optimizer.load_state_dict(plain.state_dict())
    w.grad = torch.ones_like(w)
    with pytest.raises(MisuseError, match=r"refresh\(\)"):
        optimizer.step()


def test_memory_that_is_exchanged_belongs_to_its_new_owner():
    a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = MasterWeights(torch.optim.SGD, [a, b], lr=1.0)
    a.data, b.data = b.data, a.data
    a.grad, b.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert (a.tolist(), b.tolist()) == ([1.0] * 3, [0.0] * 3)
    other = torch.full((3,), 10.0)
    mine, a.data = a.data, other
    optimizer.step()
    a.grad = torch.ones(3)
    optimizer.step()
    assert (a.tolist(), mine.tolist()) == ([9.0] * 3, [1.0] * 3)


def test_a_parameter_that_is_part_of_another_tensor_stays_there():
    whole = torch.ones(4, 6)
    part = torch.nn.Parameter(whole[:2])
    optimizer = MasterWeights(torch.optim.SGD, [part, torch.nn.Parameter(torch.ones(3))], lr=1.0)
    part.grad = torch.ones(2, 6)
    optimizer.step()
    assert whole[:2].eq(0).all()
    gaps = torch.nn.Parameter(torch.ones(400, 800, dtype=FP16)[:, :400])
    with pytest.raises(MisuseError, match=r"scattered.*contiguous"):
        MasterWeights(torch.optim.SGD, [gaps], lr=1.0)
    shared = torch.ones(3)
    with pytest.raises(MisuseError, match=r"shares its memory.*one Parameter"):
        MasterWeights(torch.optim.SGD, [torch.nn.Parameter(shared) for _ in range(2)], lr=1.0)


def test_another_memory_format_than_before_is_an_error():
    conv = torch.nn.Conv2d(64, 64, 3).to(BF16)
    optimizer = MasterWeights(torch.optim.Adam, conv.parameters(), update="split")
    conv.to(memory_format=torch.channels_last)
    give_gradients(0, list(conv.parameters()))
    with pytest.raises(MisuseError, match=r"strides.*first"):
        optimizer.step()


def test_nan_weights_are_no_drift():
    w = torch.nn.Parameter(torch.full((5,), math.nan, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert w.isnan().all()


def test_autograd_detects_that_weights_have_changed():
    for dtype in (FP32, BF16):
        w = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.1)
        loss = (w * w).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# What it refuses


def test_what_cannot_work_is_refused_with_the_reason():
    w = torch.nn.Parameter(torch.zeros(2, dtype=FP16))
    with pytest.raises(SettingsError, match=r"nearest.*masters"):
        MasterWeights(torch.optim.SGD, [w], lr=0.1, update="nearest")
    with pytest.raises(SettingsError, match=r"float16.*split.*bfloat16"):
        MasterWeights(torch.optim.SGD, [w], lr=0.1, update="split")
    with pytest.raises(SettingsError, match=r"kahan.*masters, split, stochastic"):
        MasterWeights(torch.optim.SGD, [w], lr=0.1, update="kahan")
    with pytest.raises(SettingsError, match="already"):
        MasterWeights(torch.optim.SGD([w], lr=0.1), lr=0.2)
    with pytest.raises(SettingsError, match="already"):
        MasterWeights(MasterWeights(torch.optim.SGD, [w], lr=0.1))
    with pytest.raises(SettingsError, match="needs parameters"):
        MasterWeights(torch.optim.SGD, lr=0.1)
    with pytest.raises(SettingsError, match="expected an optimizer"):
        MasterWeights("adamw", [w])
    z = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(MisuseError, match="complex"):
        MasterWeights(torch.optim.SGD, [z], lr=0.1)
    for size in (3, 40_000):
        table = torch.nn.Embedding(size, 2, sparse=True).to(FP16)
        optimizer = MasterWeights(torch.optim.SGD, table.parameters(), lr=0.1)
        table(torch.tensor([1])).float().sum().backward()
        with pytest.raises(MisuseError, match=r"weight is sparse.*sparse=False"):
            optimizer.step()


def test_sharded_parameters_are_refused_with_the_reason():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        sharded = dist.tensor.distribute_tensor(torch.zeros(4, 4), mesh, [dist.tensor.Shard(0)])
        with pytest.raises(MisuseError, match=r"DTensor.*FSDP2.*float32"):
            MasterWeights(torch.optim.SGD, [torch.nn.Parameter(sharded)], lr=0.1)
    finally:
        dist.destroy_process_group()


def test_a_fused_kernel_that_was_not_seen_is_an_error_not_a_step(monkeypatch):
    params = parameters(dtype=FP16)
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    give_gradients(0, params)
    optimizer.step()
    monkeypatch.setattr(
        PieceByPiece, "__torch_function__", lambda self, f, t, a=(), k=None: f(*a, **(k or {}))
    )
    with pytest.raises(MisuseError, match=r"0 of .* pieces"):
        optimizer.step()


# Where the gradients are, as the scaler asks for them


def sources(dtype=FP16, **options):
    """Equal weights and gradients under a plain optimizer and under masters."""
    plain, narrow = parameters([(4,), (2, 3)]), parameters([(4,), (2, 3)], dtype)
    for p, q in zip(plain, narrow, strict=True):
        p.data = q.detach().float()
        p.grad, q.grad = torch.full_like(p, 8.0), torch.full_like(q, 8.0)
    sgd = torch.optim.SGD(plain, lr=1.0, **options)
    return gradients_of(sgd), gradients_of(
        MasterWeights(torch.optim.SGD, narrow, lr=1.0, **options)
    )


def test_gradients_are_found_where_they_are():
    plain, masters = sources()
    assert (type(plain), type(masters)) == (PlainGradients, MasterGradients)
    for source in (plain, masters):
        params, held, elements = source.find()
        assert [p.grad for p in params] == held
        assert len(params) == 2
        source.note()
        assert not source.changed()
        assert [g.shape for g in source.each()] == [p.shape for p in params]
        params[1].grad = params[1].grad.clone()
        assert source.changed()
        source.find()
        source.note()
        assert not source.changed()
        params[0].grad.mul_(1)
        assert source.changed()
        assert [len(e) for e in source.find(by_parameter=True)] == [2, 2, 2]
        assert sum(e.numel() for e in elements) == 10
    assert len(masters.find()[2]) == 1  # small ones lie together
    assert (plain.gathered, masters.gathered) == (False, True)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_gradients_are_multiplied_without_loss(dtype):
    tiny = 2.0**-30  # float16 flushes it
    plain, masters = sources(dtype)
    for source in (plain, masters):
        source.find()
        source.multiply(tiny / 8)
        assert all((g.float() == tiny).all() for g in source.each())  # float16 has no 2^-30
        assert all((e[e != 0] == tiny).all() for e in source.elements)
        before = [w.detach().clone() for w in source.weights()]
        source.step(1.0, None)
        moved = [b - tiny for b in before]
        assert equal(source.weights(), moved)


@pytest.mark.parametrize("how", ["folded", "multiplied"])
def test_a_step_is_given_its_factor(how):
    for source in sources(fused=True):
        before = [w.detach().clone() for w in source.weights()]
        source.find()
        assert source.folds
        if how == "folded":
            source.step(8.0, None, just_read=True)
        else:
            source.multiplied_step(0.125)
        assert equal(source.weights(), [b - 1 for b in before])
        assert not {"grad_scale", "found_inf"} & {*vars(source.optimizer)}
        for p in source.params:
            p.grad = torch.ones_like(p)
        source.find()
        source.step(1.0, torch.ones(()))
        assert equal(source.weights(), [b - 1 for b in before])  # found_inf: nothing moves


def test_the_first_step_with_momentum_needs_the_verdict():
    for source in sources(momentum=0.5):
        assert source.must_know
        source.find()
        source.step(1.0, None) if source.folds else source.multiplied_step(1.0)
        assert not source.must_know
    assert not any(source.must_know for source in sources())


def test_an_optimizer_that_only_forwards_attributes_is_plain():
    class Forwarding:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    w = torch.nn.Parameter(torch.zeros(2))
    wrapped = Forwarding(MasterWeights(torch.optim.SGD, [w], lr=1.0))
    assert type(gradients_of(wrapped)) is PlainGradients


@pytest.mark.parametrize(("reads_only", "gathered"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("where", ["all optimizers", "this one"])
@pytest.mark.parametrize("by", ["scaler", "source"])
def test_a_hook_that_only_reads_costs_no_second_gathering(
    monkeypatch, reads_only, gathered, where, by
):
    count = []
    gather = RegionGradients.gather
    monkeypatch.setattr(
        RegionGradients, "gather", lambda self, small: count.append(1) or gather(self, small)
    )
    w = torch.nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.5)
    scaler = GradScaler("cpu", init_scale=4.0)

    def hook(*_):
        pass

    if reads_only:
        hook.gradlift_reads_only = True
    here = optimizer.register_step_pre_hook
    handle = (register_optimizer_step_pre_hook if where == "all optimizers" else here)(hook)
    try:
        scaler.scale((w.float() * 1.0).sum()).backward()
        if by == "scaler":
            scaler.step(optimizer)
        else:
            gradients = gradients_of(optimizer)
            gradients.find()
            gradients.step(4.0, None, just_read=True)
    finally:
        handle.remove()
    assert len(count) == gathered
    assert (w == 0.5).all()


# What it weighs


@pytest.mark.parametrize(
    ("dtype", "update", "bytes_each"),
    [
        (FP32, "masters", 16),  # weight 4, gradient 4, two moments of 4
        (FP16, "masters", 16),  # weight 2, gradient 2, master 4, moments 8
        (BF16, "split", 14),
        (BF16, "stochastic", 12),
    ],
)
def test_bytes_per_parameter(dtype, update, bytes_each):
    n = 2**21
    before = storages()
    params = [torch.nn.Parameter(torch.zeros(n // 2, dtype=dtype)) for _ in range(2)]
    optimizer = MasterWeights(torch.optim.AdamW, params, lr=1e-3, update=update)
    for step in range(2):
        give_gradients(step, params)
        optimizer.step()
    held = {place: size for place, size in storages().items() if place not in before}
    # Pieces in float32, at any size: a gradient's, and a weight's if there is no master.
    scratch = 0 if dtype is FP32 else (1 if update == "masters" else 2) * 4 * 2**18
    assert sum(held.values()) == pytest.approx(bytes_each * n + scratch, rel=1e-3)


def storages():
    """Address and size of every tensor's memory that is alive."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


# Anything, in any order

ACTIONS = [
    "backward",
    "backward",
    "some",
    "step",
    "step",
    "step",
    "zero",
    "zero fill",
    "model zero",
]
ACTIONS += ["double", "add group", "freeze", "thaw", "save", "copy", "refresh", "lr", "overflow"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=30),
    st.sampled_from([FP32, FP16, BF16]),
    st.sampled_from(["sgd", "adamw", "adafactor"]),
)
def test_any_sequence_is_what_the_plain_optimizer_makes_of_it(actions, dtype, name):
    kind, options = OPTIMIZERS[name]
    options = options if name == "adafactor" else {**options, "fused": False}
    shapes = [(6, 5), (40,), (200, 200), (3,)]
    ours = parameters(shapes, dtype)
    plain = masters_of(ours)
    optimizer, reference = MasterWeights(kind, ours, **options), kind(plain, **options)
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=10**6, min_scale=1.0)
    for n, action in enumerate(actions):
        if action in ("backward", "some"):
            give_more(n, ours, plain, every=2 if action == "some" else 1)
        elif action == "step":
            scaler.get_scale()  # gradients scaled by hand
            scaler.step(optimizer) if n % 2 else optimizer.step()
            scaler.update()
            reference.step()
        elif action == "zero":
            optimizer.zero_grad()
            reference.zero_grad()
        elif action == "zero fill":
            optimizer.zero_grad(set_to_none=False)
            reference.zero_grad(set_to_none=False)
        elif action == "model zero":
            torch.nn.ParameterList(ours).zero_grad()
            torch.nn.ParameterList(plain).zero_grad()
        elif action == "double":
            for p in (*ours, *plain):
                if p.grad is not None:
                    p.grad.mul_(2)
        elif action == "add group":
            more = parameters([(5, 3), (9,)], dtype, seed=n)
            plain += masters_of(more)
            ours += more
            optimizer.add_param_group({"params": more, "lr": 0.02})
            reference.add_param_group({"params": plain[-2:], "lr": 0.02})
        elif action in ("freeze", "thaw"):
            for p in (ours[1], plain[1]):
                p.requires_grad_(action == "thaw")
                p.grad = None
        elif action == "save":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif action == "copy":
            grads = [p.grad for p in ours]  # torch copies none
            ours, optimizer = copy.deepcopy((ours, optimizer))
            for p, grad in zip(ours, grads, strict=True):
                p.grad = grad
        elif action == "refresh":
            optimizer.refresh([p.detach().clone() for p in plain])
        elif action == "lr":
            for group in (*optimizer.param_groups, *reference.param_groups):
                group["lr"] *= 0.5
        elif action == "overflow":
            with_inf = next((p for p in ours if p.grad is not None), None)
            if with_inf is not None:
                kept = with_inf.grad
                with_inf.grad = torch.full_like(kept, math.inf)
                scaler.get_scale()  # gradients scaled by hand
                scaler.step(optimizer)
                scaler.update()
                assert not scaler.result.stepped
                with_inf.grad = kept
    assert equal(optimizer.masters, plain)
    assert equal(ours, [p.to(dtype) for p in plain])


def give_more(n, ours, plain, every):
    """Adds gradients as backward does: small whole numbers, so that any dtype adds them exactly."""
    g = torch.Generator().manual_seed(n)
    for i, (p, q) in enumerate(zip(ours, plain, strict=True)):
        if i % every == 0 and p.requires_grad:
            gradient = torch.randint(-4, 5, p.shape, generator=g).float()
            for each in (p, q):
                old = each.grad
                each.grad = (
                    gradient.to(each.dtype) if old is None else old + gradient.to(each.dtype)
                )


# Masters that leave the range of their 16-bit weights

BEYOND = [
    (torch.float16, "masters", 65000.0, 1000.0),
    (torch.bfloat16, "masters", 3.3895e38, 1e36),
    (torch.bfloat16, "split", 3.3895e38, 1e36),
    (torch.bfloat16, "stochastic", 3.3895e38, 1e36),
]


@both_paths
@pytest.mark.parametrize("how", [{}, {"fused": False}, {"shapes": True}])
@pytest.mark.parametrize(("dtype", "update", "start", "by"), BEYOND)
def test_a_weight_never_becomes_infinite(dtype, update, start, by, how, device_path, tmp_path):
    how, kind = dict(how), torch.optim.SGD
    if how.pop("shapes", False):  # a subclass is given every parameter in its shape
        kind = type("Shaped", (torch.optim.SGD,), {})
    w, v, far = (torch.nn.Parameter(torch.full((3, 2), x, dtype=dtype)) for x in (start, 1, -start))
    params = [w, v, far]
    optimizer = MasterWeights(kind, params, lr=1.0, update=update, **how)
    where = tmp_path / "run.jsonl"
    scaler = GradScaler(
        "cpu",
        init_scale=1.0,
        names={"w": w, "v": v, "far": far},
        journal=where,
        growth_interval=100,
    )
    scaler._force_device_path = device_path
    most = torch.finfo(dtype).max
    told = []
    for sign in (-1, 1, 1, 1):
        w.grad, v.grad = torch.full_like(w, sign * by), torch.zeros_like(v)
        far.grad = torch.full_like(w, -sign * by)
        scaler.get_scale()  # gradients scaled by hand
        scaler.step(optimizer)
        scaler.update()
        assert all(p.isfinite().all() for p in params)
        told.append(scaler.result)
    assert all(r.stepped and not r.skipped for r in told)
    assert scaler.skipped_steps == 0
    first = told[0]
    assert [r.cause for r in told] == [Cause.WEIGHT_RANGE] + [Cause.NONE] * 3
    assert list(first.culprits) == ["w", "far"]
    assert (
        f"master of w and 1 more left the range of its 16-bit weight, which stays at {most:.6g}"
        in (first.notes[-1])
    )
    assert told[-1].cause is Cause.NONE
    assert (v == 1).all()
    scaler.flush()
    run = read_journal(where)
    assert [s.cause for s in run.steps] == [r.cause for r in told]
    assert not any(s.skipped for s in run.steps)
    assert [e.detail["code"] for e in run.events] == ["weight-range"]
    again = replay(run, "torch:init_scale=1,growth_interval=100")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]


@pytest.mark.parametrize(("dtype", "update", "start", "by"), BEYOND)
def test_a_weight_at_its_limit_is_no_drift_and_can_be_saved(dtype, update, start, by):
    def made():
        w = torch.nn.Parameter(torch.full((3,), start, dtype=dtype))
        return w, MasterWeights(torch.optim.SGD, [w], lr=1.0, momentum=0.5, update=update)

    (w, optimizer), (again, loaded) = made(), made()
    w.grad = torch.full_like(w, -by)
    with pytest.warns(UserWarning, match="left the range of their 16-bit weights"):
        optimizer.step()
    assert w.isfinite().all()
    again.data.copy_(w.data)
    loaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(loaded.masters[0], optimizer.masters[0])
    for p, o in ((w, optimizer), (again, loaded)):
        p.grad = torch.full_like(p, by)
        for _ in range(4):
            o.step()
    assert torch.equal(w, again)
    assert w.isfinite().all()


@pytest.mark.parametrize(("dtype", "update", "start", "by"), BEYOND[:3])
def test_float32_weights_beyond_the_range_are_taken_as_far_as_it_goes(dtype, update, start, by):
    w = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0, update=update)
    optimizer.refresh([torch.tensor([3.4e38, -3.4e38])])
    most = torch.finfo(dtype).max
    assert w.tolist() == [most, -most]


# Checkpoints that are not finite


@pytest.mark.parametrize("key", ["master", "exp_avg", "exp_avg_sq", "step", "apart", "lr"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_checkpoint_that_is_not_finite_is_refused_by_name_and_index(key, bad):
    def made():
        model = torch.nn.Linear(4, 3).to(BF16)
        return model, MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.125)

    (model, optimizer), (_, fresh) = made(), made()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if key != "apart":
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    if key == "lr":
        state["param_groups"][0]["lr"] = bad = math.nan
    elif key == "step":
        state["state"][0]["step"].fill_(bad)
    else:
        held = state["gradlift"]["apart"][0] if key == "apart" else state["state"][0]
        held["master" if key == "apart" else key][2, 1] = bad
    before = copy.deepcopy(fresh.state_dict())
    where = {"lr": "lr of parameter group 0 is nan", "step": f"the state 'step' is {bad} at"}
    said = where.get(key, f"the state '{'master' if key == 'apart' else key}' is {bad} at")
    with pytest.raises(StateError) as refused:
        fresh.load_state_dict(state)
    assert said in str(refused.value)
    if key not in ("lr", "step"):
        assert "[2, 1] of " in str(refused.value)
    assert str(fresh.state_dict()) == str(before)


def test_the_rest_of_a_checkpoint_that_is_not_finite_can_be_loaded():
    model = torch.nn.Linear(4, 3).to(FP16)
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.125)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"][1, 1] = math.nan
    again = copy.deepcopy(model)
    loaded = MasterWeights(torch.optim.AdamW, again.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match=r"the state of weight was not finite: it begins anew"):
        loaded.load_state_dict(state, strict=False)
    assert loaded.param_groups[0]["lr"] == 0.125
    assert torch.equal(loaded.masters[1], optimizer.masters[1])
    assert torch.equal(loaded.masters[0], again.weight.float())
    assert {*loaded.state[again.bias]} == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert not loaded.state[again.weight]
    for p in again.parameters():
        p.grad = torch.ones_like(p)
    loaded.step()
    assert all(p.isfinite().all() for p in again.parameters())


def test_weights_to_refresh_from_are_finite():
    w = torch.nn.Parameter(torch.zeros(2, dtype=FP16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.1)
    with pytest.raises(StateError, match=r"of which one is nan at \[1\]"):
        optimizer.refresh([torch.tensor([1.0, math.nan])])
    assert not w.any()


@pytest.mark.parametrize("device_path", [False, True])
def test_a_step_without_gradients_after_a_weight_left_its_range(device_path):
    """What the step before has left in the optimizer is not this one's cause."""
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterWeights(torch.optim.SGD, [w], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0, names={"w": w})
    scaler._force_device_path = device_path
    causes = []
    for g in (-49152.0, -49152.0, None):
        w.grad = None if g is None else torch.full_like(w, g)
        scaler.get_scale()  # gradients scaled by hand
        scaler.step(optimizer)
        scaler.update()
        causes.append(scaler.result.cause)
    assert causes == [Cause.NONE, Cause.WEIGHT_RANGE, Cause.NO_GRADIENTS]

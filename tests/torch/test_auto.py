""" "auto" on real float16 gradients: the scale is found at once, and no batch is lost."""

import math
import random

import pytest
import torch
from helpers.torch import bits
from torch import nn

from gradlift import Cause, Verdict
from gradlift.errors import MisuseError
from gradlift.rules import Headroom, parse
from gradlift.torch import GradScaler, probe
from gradlift.torch.scaler.graph import FullPrecision, never_half


def make(seed=0, out=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, out))


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(32, 8, generator=g), torch.randint(4, (32,), generator=g)


def closure_for(model, step, factor=1.0):
    def closure():
        x, y = batch(step)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return nn.functional.cross_entropy(out.float(), y) * factor

    return closure


def largest_sound_scale(model, step, factor=1.0):
    """By trying: the largest power of two at which this batch's gradients are finite."""
    for k in range(60, -60, -1):
        model.zero_grad()
        (closure_for(model, step, factor)() * 2.0**k).backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            model.zero_grad()
            return 2.0**k
    raise AssertionError("none")


def story(scaler, model, steps, factor=lambda step: 1.0, retries=8, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return [
        scaler.train_step(
            closure_for(model, step, factor(step)), optimizer, retries=retries, model=model
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("start", ["2^32", "2^0", "2^16", "2^-10", "2^40"])
def test_from_any_start_the_first_batch_is_used_within_four_bits(start, device_path):
    model = make()
    limit = largest_sound_scale(model, 0)
    scaler = GradScaler("cpu", rule=f"auto:init_scale={start}")
    scaler._force_device_path = device_path
    first, *rest = story(scaler, model, 20)
    assert first.stepped
    assert first.retries <= 4
    assert limit / 16 <= first.scale <= limit
    assert all(r.stepped for r in rest)
    assert scaler.skipped_steps == 0


def test_a_start_that_is_near_enough_costs_no_second_pass():
    model = make()
    limit = largest_sound_scale(model, 0)
    (first,) = story(GradScaler("cpu", rule=parse(f"auto:init_scale={limit / 8}")), model, 1)
    assert (first.stepped, first.retries) == (True, 0)


def test_a_start_that_is_far_too_low_is_recorded_as_calibration():
    told = []
    scaler = GradScaler("cpu", rule="auto:init_scale=2^0", on_event=told.append)
    (result,) = story(scaler, make(), 1)
    assert result.retries == len(told) > 0
    assert {(e.what, e.detail["cause"]) for e in told} == {("retry", "CALIBRATION")}
    assert told[0].detail["next_scale"] > 8 * told[0].detail["scale"]


def test_a_spike_of_ten_bits_loses_nothing_and_is_soon_forgotten():
    model = make()
    scaler = GradScaler("cpu", rule="auto")
    results = story(scaler, model, 400, lambda step: 2.0**10 if step == 50 else 1.0, lr=0.0)
    assert all(r.stepped for r in results)
    assert results[50].retries >= 1
    assert sum(r.retries for r in results[60:]) <= 3
    before, after = results[49].scale, results[399].scale
    assert results[51].scale < before
    assert after >= before / 4


def test_a_non_finite_loss_moves_nothing():
    model = make()
    scaler = GradScaler("cpu", rule="auto")
    results = story(scaler, model, 30, lambda step: math.nan if step == 20 else 1.0, lr=0.0)
    assert [r.cause for r in results if not r.stepped] == [Cause.LOSS_NONFINITE]
    assert results[20].retries == 0
    assert results[21].scale == results[20].scale == results[19].scale


def test_ten_thousand_steps_of_tiny_gradients():
    """True gradients near 2^-30: float16 holds none of them without a scale."""
    model = make()
    tiny = 2.0**-28
    limit = largest_sound_scale(model, 0, tiny)
    assert limit >= 2.0**36
    scaler = GradScaler("cpu", rule=f"auto:init_scale=2^16,max_scale={2.0**60}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    retries = 0
    for step in range(10_000):
        closure = closure_for(model, step % 7, tiny)
        result = scaler.train_step(closure, optimizer, retries=8, model=False)
        assert result.stepped
        assert result.scale >= limit / 64
        retries += result.retries
    assert retries <= 60  # six in a thousand


def test_batches_without_gradient_signal_are_no_news():
    """Reinforcement learning: a group of equal answers has no advantage, its gradient is zero."""
    model = make()
    scaler = GradScaler("cpu", rule="auto")
    results = story(scaler, model, 60, lambda step: 0.0 if step % 3 else 1.0, lr=0.0)
    scales = {r.scale for r in results[10:]}
    assert all(r.stepped for r in results)
    assert max(scales) / min(scales) <= 4


# auto and auto:cautious


def test_auto_is_cautious_until_something_retries():
    scaler = GradScaler("cpu", rule="auto")
    assert scaler.rule == parse("auto:cautious")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.train_step(closure_for(model, 0), optimizer)
    assert scaler.rule == parse("auto:cautious")
    scaler.train_step(closure_for(model, 1), optimizer, retries=1, model=model)
    assert scaler.rule == parse("auto")
    assert scaler._settings.rule == parse("auto")


def test_settings_of_auto_hold_for_both_and_other_rules_stay_what_they_are():
    scaler = GradScaler("cpu", rule="auto:init_scale=2^3,band_bits=2")
    assert scaler.rule == parse("auto:cautious,init_scale=2^3,band_bits=2")
    assert scaler.get_scale() == 8.0
    assert GradScaler("cpu", rule="auto:cautious").rule == parse("auto:cautious")
    assert GradScaler("cpu", rule="Auto : Cautious").rule == parse("auto:cautious")
    assert GradScaler("cpu", rule="headroom").rule == Headroom()
    assert GradScaler("cpu", rule=parse("auto")).rule == parse("auto")


# calibrate


def everything(model):
    weights = [p.detach().clone() for p in model.parameters()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    return weights, grads, buffers, torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("start", ["2^32", "2^0"])
def test_calibrate_finds_the_scale_and_leaves_everything_as_it_was(start, device_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    closure_for(model, 3)().backward()
    model[0].bias.grad = None
    limit = largest_sound_scale(make(), 0)
    scaler = GradScaler("cpu", rule=f"auto:cautious,init_scale={start}")
    scaler._force_device_path = device_path
    calls = []

    def closure():
        calls.append(1)
        return closure_for(model, 0)(), random.random() * 0 + model[0].weight.sum() * 0

    before = bits(everything(model))
    scale = scaler.calibrate(closure, model=model)
    assert bits(everything(model)) == before
    assert scale == scaler.get_scale()
    assert limit / 2**8 <= scale <= limit * 2
    assert len(calls) <= 6
    assert scaler.skipped_steps == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert scaler.train_step(closure, optimizer).stepped


def test_calibrate_uses_probes():
    found = {}
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        if looks:
            probe(model, every=100)
        scaler = GradScaler("cpu", rule="auto:cautious")

        def closure(model=model):
            with torch.autocast("cpu", torch.float16):
                return model(batch(0)[0] * 2.0**-10).float().abs().mean()

        found[looks] = scaler.calibrate(closure, model=model)
    assert found[True] < found[False]


def test_calibrate_with_a_rule_that_halves_finds_its_way_down():
    model = make()
    scaler = GradScaler("cpu", init_scale=2.0**40)
    assert scaler.calibrate(closure_for(model, 0), model=model) == largest_sound_scale(model, 0)


def test_calibrate_works_on_float16_weights():
    model = make().half()
    x, y = batch(0)
    scaler = GradScaler("cpu", rule="auto:init_scale=2^32")

    def closure():
        return nn.functional.cross_entropy(model(x.half()).float(), y)

    assert 2.0**8 < scaler.calibrate(closure, model=model) < 2.0**20


def test_calibrate_tells_what_no_scale_can_cure():
    model = make()
    before = bits(everything(model))
    scaler = GradScaler("cpu", rule="auto")
    with pytest.raises(MisuseError, match="whose loss is nan"):
        scaler.calibrate(closure_for(model, 0, math.nan), model=model)
    with pytest.raises(MisuseError, match="found no gradients"):
        scaler.calibrate(closure_for(model, 0), model=make())
    model.zero_grad()

    def bad():
        w = model[0].weight
        return closure_for(model, 0)() + (w - w.detach()).abs().sqrt().sum()  # 0 * inf backwards

    with pytest.raises(MisuseError, match="not finite even at scale"):
        scaler.calibrate(bad, model=model)
    assert bits(everything(model)) == before
    assert not scaler._scales[None].windows


def test_calibrate_of_a_disabled_scaler_is_one():
    assert GradScaler("cpu", enabled=False).calibrate(lambda: 1 / 0, model=make()) == 1.0


def test_the_verdict_is_retry_while_it_calibrates():
    told = []
    scaler = GradScaler("cpu", rule="auto:init_scale=2^32", on_event=told.append)
    (result,) = story(scaler, make(), 1)
    assert result.verdict is Verdict.APPLY
    assert {e.detail["cause"] for e in told} <= {"OVERFLOW", "CALIBRATION"}
    assert told[0].detail["cause"] == "OVERFLOW"


# which gradients count


class Mixed(nn.Module):
    """Under autocast the embedding is float32, the linear layer float16."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(2, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x):
        return self.head(self.words(x))


def mixed_reading(device_path, spoil=None):
    torch.manual_seed(0)
    model = Mixed()
    with torch.no_grad():
        model.words.weight.mul_(2.0**-6)
    scaler = GradScaler("cpu", rule="auto:init_scale=2^10")
    scaler._force_device_path = device_path
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        out = model(torch.zeros(512, dtype=torch.long))  # one word: its gradient is a sum of 512
    scaler.scale(out.float().square().sum()).backward()
    if spoil is not None:
        getattr(model, spoil).weight.grad[0, 0] = math.inf
    norm = scaler.clip_grad_norm_(optimizer, 1e9)
    window = next(iter(scaler._scales[None].windows.values()))
    return model, window.reading, norm


@pytest.mark.parametrize("device_path", [False, True])
def test_amax_leaves_out_gradients_that_never_were_float16(device_path):
    model, reading, norm = mixed_reading(device_path)
    words, head = (p.grad for p in model.parameters())
    assert words.abs().max() > 2 * head.abs().max()
    assert float(reading.amax) == head.abs().max().item()
    both = torch.cat([words.flatten(), head.flatten()]).double().norm() / 2**10
    assert abs(float(norm) - both) < 1e-5 * both


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("spoil", ["words", "head"])
def test_a_bad_gradient_is_seen_wherever_it_is(spoil, device_path):
    _, reading, _ = mixed_reading(device_path, spoil=spoil)
    assert bool(reading.nonfinite)


def test_without_any_float16_all_gradients_count():
    model = Mixed()
    scaler = GradScaler("cpu", rule="auto")
    scaler.scale(model(torch.zeros(512, dtype=torch.long)).square().sum()).backward()
    scaler.clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=0.1), 1e9)
    window = next(iter(scaler._scales[None].windows.values()))
    assert window.reading.amax == max(p.grad.abs().max().item() for p in model.parameters())


def test_one_use_in_float16_is_enough_to_count():
    norm, linear = nn.LayerNorm(2, bias=False), nn.Linear(2, 2, bias=False)
    params, full = [norm.weight, linear.weight], FullPrecision()
    with torch.autocast("cpu", torch.float16):
        full.learn(linear(norm(torch.ones(1, 2))).float().sum())
        assert full.positions(params) == {0}
        full.learn((linear(norm(torch.ones(1, 2))) @ norm.weight.view(2, 1)).float().sum())
    assert full.positions(params) == set()


def test_what_a_custom_function_hides_may_be_float16():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.half().float().sum()

        @staticmethod
        def backward(ctx, g):
            return g.half().float().expand(4)

    w = nn.Parameter(torch.ones(4))
    full, rest = never_half(Hidden.apply(w))
    assert (full, rest) == ([], [w])


# what a hostile reader tried


def test_sharp_starts_as_sharp_does_and_a_resumed_run_stays_sharp():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler, plain = GradScaler("cpu", rule="auto"), GradScaler("cpu", rule=parse("auto"))
    for each in (scaler, plain):
        each.train_step(closure_for(model, 0), optimizer, retries=4, model=model)
    assert scaler._scales[None].numbers() == plain._scales[None].numbers()
    again = GradScaler("cpu", rule="auto")
    again.load_state_dict(scaler.state_dict())
    assert again.rule == parse("auto")
    gentle = GradScaler("cpu", rule="auto")
    gentle.load_state_dict(GradScaler("cpu", rule="auto").state_dict())
    assert gentle.rule == parse("auto:cautious")


def test_calibrate_in_the_middle_of_a_window_is_refused():
    model = make()
    scaler = GradScaler("cpu", rule="auto")
    scaler.scale(closure_for(model, 0)()).backward()
    with pytest.raises(MisuseError, match="between scale\\(\\) and update\\(\\)"):
        scaler.calibrate(closure_for(model, 0), model=model)


def test_a_calibration_that_breaks_off_leaves_nothing_behind():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * math.nan

        @staticmethod
        def backward(ctx, g):
            raise KeyboardInterrupt

    model = make()
    scaler = GradScaler("cpu", rule="auto")
    with pytest.raises(KeyboardInterrupt):
        scaler.calibrate(lambda: Broken.apply(closure_for(model, 0)()), model=model)
    scale = scaler._scales[None]
    assert (scale.calls, scale.micro, scale.windows) == (0, [], {})


@pytest.mark.parametrize("rule", ["dynamic:growth_interval=1", "auto", "auto:cautious"])
def test_calibrate_ends_at_a_scale_that_it_has_tried(rule):
    model = make()
    calls = []
    scaler = GradScaler("cpu", rule=parse(rule))

    def closure():
        calls.append(scaler.get_scale())
        return closure_for(model, 0)()

    scale = scaler.calibrate(closure, model=model)
    assert scale in calls
    assert scale <= largest_sound_scale(model, 0)
    assert len(calls) <= 8


def test_calibrate_puts_back_the_very_gradients():
    model = make()
    closure_for(model, 3)().backward()
    before = [p.grad for p in model.parameters()]
    GradScaler("cpu", rule="auto").calibrate(closure_for(model, 0), model=model)
    assert all(p.grad is g for p, g in zip(model.parameters(), before))


def test_zeros_at_first_do_not_cost_the_next_batch():
    model = make()
    scaler = GradScaler("cpu", rule="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for factor in (0.0, 0.0, 2.0**-4):
        assert scaler.train_step(closure_for(model, 0, factor), optimizer).stepped


def test_a_weight_that_is_cast_on_the_way_counts():
    class Matmul(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x @ self.weight.t()

    for layer in (Matmul(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))):
        model = nn.Sequential(nn.LayerNorm(8), layer, nn.Linear(8, 1))
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(16, 8)).float().mean()
        full, _ = never_half(loss)
        assert {id(p) for p in full} == {id(p) for p in model[0].parameters()}


@pytest.mark.parametrize("retries", range(7))
def test_a_sound_first_batch_is_never_lost_by_trying_a_higher_scale(retries):
    """Activation gradients 17 bits above those of the weights: no parameter shows them."""
    w = nn.Parameter(torch.ones(4))

    def closure():
        return ((w.half() * torch.full((4,), 6e-6).half()).float() * 0.5).sum()

    scaler = GradScaler("cpu", rule="auto")
    optimizer = torch.optim.SGD([w], lr=0.0)
    result = scaler.train_step(closure, optimizer, retries=retries, model=False)
    assert result.stepped
    assert result.retries <= retries

"""find_scale on live batches: the command's table, and nothing is changed by looking."""

import math

import pytest
import torch
from torch import nn

from gradlift import formats
from gradlift.analysis.static_scale import find_scale as find_recorded
from gradlift.errors import MisuseError, SettingsError
from gradlift.torch import GradScaler, find_scale


def one_weight(value):
    """A model whose only gradient is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False)
    return model, [torch.full((2, 1), v) for v in value], lambda model, x: model(x).mean()


def test_the_scale_puts_the_largest_gradient_margin_bits_below_the_top():
    model, batches, loss = one_weight([2.0**-20, 2.0**-22])
    for margin in (0, 1, 3):
        advice = find_scale(model, batches, loss, margin_bits=margin)
        assert (advice.verdict, advice.scale) == ("static", 2.0 ** (15 + 20 - margin))
    assert "leaves 3 bits above it" in advice.reason


def test_live_and_recorded_gradients_give_the_same_scale(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    batches = [torch.randn(16, 8) for _ in range(8)]

    def loss(model, x):
        return model(x).square().mean() * 2.0**-20

    live = find_scale(model, batches, loss)
    path = tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule="static:2^10", journal=path, every=1)
    for x in batches:
        optimizer.zero_grad()
        scaler.scale(loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
    recorded = find_recorded(path)
    assert (recorded.verdict, recorded.scale) == (live.verdict, live.scale)
    assert live.verdict == "static"
    assert recorded.candidates == live.candidates


def test_it_says_when_none_is_needed_and_when_none_fits():
    assert find_scale(*one_weight([1.0])).verdict == "none"
    advice = find_scale(*one_weight([2.0**-45, 1.0]))
    assert advice.verdict == "no single scale"
    assert "layerwise" in advice.reason


def test_the_first_format_is_the_one_that_is_wanted():
    model, batches, loss = one_weight([2.0**-20])
    advice = find_scale(model, batches, loss, formats=["e4m3", formats.FP16])
    assert advice.scale == 2.0 ** (8 + 20 - 3)  # E4M3 ends at 448
    assert list(advice.candidates[0].formats) == ["E4M3", "FP16"]
    assert "E4M3's normal numbers" in advice.reason


def test_the_text_is_the_commands_table():
    text = str(find_scale(*one_weight([2.0**-20])))
    assert text.splitlines()[0].split() == ["scale", "FP16", "BF16", "E4M3", "E5M2", "steps"]
    (chosen,) = [line for line in text.splitlines() if line.endswith("<-")]
    assert chosen.split()[0] == "2^32"
    assert "Use 2^32." in text


def test_looking_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model(torch.randn(4, 4)).sum().backward()
    batch = torch.randn(4, 4)
    kept = {
        **{f"w {n}": p.detach().clone() for n, p in model.named_parameters()},
        **{f"g {n}": p.grad.clone() for n, p in model.named_parameters()},
        **{f"b {n}": b.clone() for n, b in model.named_buffers()},
        "random": torch.get_rng_state(),
    }
    find_scale(model, [batch], lambda m, x: m(x).square().mean())
    now = {
        **{f"w {n}": p.detach() for n, p in model.named_parameters()},
        **{f"g {n}": p.grad for n, p in model.named_parameters()},
        **{f"b {n}": b for n, b in model.named_buffers()},
        "random": torch.get_rng_state(),
    }
    assert all(torch.equal(now[name], kept[name]) for name in now)
    assert not model._forward_pre_hooks


def test_activation_gradients_bound_the_scale_too():
    """Float16 activations far above the gradients of the weights: seen by the probes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False))
    x = torch.randn(4, 8) * 2.0**-9

    def half(model, x):
        with torch.autocast("cpu", torch.float16):
            return model(x).float().mean() / 16

    def full(model, x):
        return model(x).mean() / 16

    narrow, wide = find_scale(model, [x], half), find_scale(model, [x], full)
    assert narrow.scale < wide.scale


def test_batches_that_are_not_finite_are_left_out():
    model, batches, loss = one_weight([2.0**-20, math.inf, math.nan])
    advice = find_scale(model, batches, loss)
    assert advice.scale == 2.0**32
    advice = find_scale(model, batches[1:], loss)
    assert advice.verdict == "unknown"
    assert "No batch gave finite gradients" in advice.reason


def test_misuse_is_refused():
    model, batches, loss = one_weight([1.0])
    with pytest.raises(MisuseError, match="no batches"):
        find_scale(model, [], loss)
    with pytest.raises(SettingsError, match="formats is empty"):
        find_scale(model, batches, loss, formats=[])
    with pytest.raises(SettingsError, match="margin_bits is -1"):
        find_scale(model, batches, loss, margin_bits=-1)
    with pytest.raises(SettingsError):
        find_scale(model, batches, loss, formats=["fp17"])

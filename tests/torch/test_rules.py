"""Rules on torch tensors, and beside torch's and DeepSpeed's own."""

import random

import pytest
import torch
from conformance import exact
from deepspeed.runtime.fp16 import loss_scaler as deepspeed_scaler

from gradlift import Reading, rules

SEEDS, STEPS = range(3), 3000


@pytest.mark.parametrize("rule", exact.EVERY)
def test_rules_give_the_same_bits(rule):
    exact.check(rule, torch, lambda x, kind: torch.tensor(x, dtype=getattr(torch, kind)))


def run_beside(rule, original, seed):
    """`original(overflow) -> its scale`; steered so that the scale stays in range."""
    rng, state = random.Random(seed), rule.init()
    for step in range(STEPS):
        overflow = exact.overflows(rng, state.scale)
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        assert state.scale == original(overflow), f"step {step}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("interval", [3, 7])
def test_torch_preset_is_torchs_kernel(seed, interval):
    scale = torch.tensor(2.0**16)
    tracker = torch.tensor(0, dtype=torch.int32)

    def original(overflow):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        return scale.item()

    run_beside(rules.preset("torch", growth_interval=interval), original, seed)


def test_non_powers_of_two_follow_torch_as_well():
    scale = torch.tensor(1000.0)
    tracker = torch.tensor(0, dtype=torch.int32)

    def original(overflow):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 1.1, 0.7, 3)
        return scale.item()

    rule = rules.preset(
        "torch",
        init_scale=1000,
        growth_factor=1.1,
        backoff_factor=0.7,
        growth_interval=3,
        powers_of_two=False,
    )
    run_beside(rule, original, 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hysteresis", [1, 2, 4])
@pytest.mark.parametrize("consecutive", [False, True])
def test_deepspeed_preset_is_deepspeeds_class(seed, hysteresis, consecutive, monkeypatch):
    monkeypatch.setattr(deepspeed_scaler.dist, "get_rank", lambda: 1)  # its prints want a job
    peer = deepspeed_scaler.DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=5,
        min_scale=1,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive,
        raise_error_at_min_scale=False,
    )

    def original(overflow):
        peer.update_scale(overflow)
        return peer.cur_scale

    rule = rules.preset(
        "deepspeed",
        growth_interval=5,
        hysteresis=hysteresis,
        hysteresis_refill="clean" if consecutive else "growth",
    )
    run_beside(rule, original, seed)

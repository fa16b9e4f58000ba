"""Every peer's rule, step for step: each row of the table against a transcription of its source.

Where the original installs (torch, keras, jmp, flax, deepspeed) it is itself run beside ours in
that framework's folder; `ROWS` must name every preset, so a row that is missing fails.
"""

import random

import peers
import pytest

from gradlift import Reading, rules

SEEDS, STEPS = range(3), 4000

# preset -> transcription, settings of the preset, settings of the transcription where they differ
SHORT = {"growth_interval": 7}
ROWS = {
    "torch": (peers.Torch, SHORT, {}),
    "apex": (peers.Apex, SHORT, {}),
    "apex-fp16": (peers.ApexFP16, SHORT, {}),
    "tf.keras": (peers.TFKeras, SHORT, {}),
    "keras": (peers.Keras3, SHORT, {}),
    "mxnet": (peers.MXNet, SHORT, {}),
    "jmp": (peers.JMP, SHORT, {"init_scale": 2.0**15}),
    "flax": (peers.Flax, SHORT, {}),
    "mpx": (peers.MPX, SHORT, {"init_scale": 2.0**15}),
    "deepspeed": (peers.DeepSpeed, {**SHORT, "hysteresis": 3}, {"raise_at_min": False}),
    "megatron": (peers.Megatron, {**SHORT, "hysteresis": 3}, {}),
    "nemo": (peers.NeMo, {**SHORT, "hysteresis": 2}, {}),
    "fairseq": (peers.Fairseq, {**SHORT, "tolerance": 0.05}, {}),
    "metaseq": (peers.Metaseq, SHORT, {}),
    "colossalai": (peers.ColossalAI, {**SHORT, "hysteresis": 2}, {}),
    "paddle": (peers.Paddle, {**SHORT, "hysteresis": 2}, {}),
    "mindspore": (peers.MindSpore, SHORT, {}),
    "modulus": (
        peers.Modulus,
        {**SHORT, "recover_below": 2.0**6, "recover_interval": 3},
        {"recover_threshold": 2.0**6, "recover_growth_interval": 3},
    ),
    "verl": (peers.Verl, SHORT, {}),
    "openseq2seq": (peers.OpenSeq2SeqBackoff, SHORT, {}),
}
OTHERS = {"dynamic": "ours", "auto": "ours", "auto:cautious": "ours"}


def test_no_row_is_missing():
    assert {*ROWS, *OTHERS} == set(rules.PRESETS)


class Overflows:
    """Overflows one by one and in bursts, fewer where the scale is low and more where it is high,
    so that every peer stays in range and all steps count."""

    def __init__(self, seed, share):
        self.rng, self.share, self.burst = random.Random(seed), share, 0

    def __call__(self, scale):
        if scale < 2.0**-8:
            return False
        if scale > 2.0**24:
            return self.rng.random() < 0.4
        if self.burst == 0 and self.rng.random() < self.share / 4:
            self.burst = self.rng.randrange(2, 9)
        self.burst = max(0, self.burst - 1)
        return self.burst > 0 or self.rng.random() < self.share


def compare(rule, peer, seed, share):
    """Runs both over the same trace; how often the scale moved."""
    state, overflows, moved = rule.init(), Overflows(seed, share), 0
    assert state.scale == peer.scale
    for step in range(STEPS):
        overflow = overflows(peer.scale)
        peer.update(overflow)
        before = state.scale
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        moved += state.scale != before
        assert state.scale == peer.scale, f"step {step}"
    return moved


def both(name, **more):
    peer, settings, theirs = ROWS[name]
    shared = {k: v for k, v in settings.items() if not k.startswith("recover")}
    return rules.preset(name, **settings, **more), peer(**{**shared, **theirs, **more})


@pytest.mark.parametrize("share", [0.02, 0.08, 0.13])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ROWS)
def test_same_scales_as_the_peer(name, seed, share):
    assert compare(*both(name), seed, share) > 50


@pytest.mark.parametrize("name", ROWS)
def test_defaults_are_the_peers(name):
    """Untouched settings: the first growth comes on the same step, the first overflow the same."""
    peer_class = ROWS[name][0]
    start = {"init_scale": 2.0**15} if name in ("jmp", "mpx") else {}
    for trace in ([False] * 20_000, [True] * 12, [True, False] * 12):
        rule, peer = rules.preset(name), peer_class(**start)
        state = rule.init()
        for step, overflow in enumerate(trace):
            assert state.scale == peer.scale, f"step {step}"
            peer.update(overflow)
            state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))


@pytest.mark.parametrize(
    ("name", "more", "theirs"),
    [
        ("deepspeed", {"hysteresis_refill": "clean"}, {"consecutive_hysteresis": True}),
        ("fairseq", {"tolerance": 0.25}, {"tolerance": 0.25}),
        ("paddle", {"hysteresis": 4}, {"hysteresis": 4}),
        ("nemo", {"hysteresis": 4}, {"hysteresis": 4}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_peers_options(name, more, theirs, seed):
    peer, settings, same = ROWS[name]
    rule = rules.preset(name, **{**settings, **more})
    assert compare(rule, peer(**{**settings, **same, **theirs}), seed, 0.1) > 50

"""One trace of readings, every rule: the same bits on every array library as on Python numbers."""

import math

import numpy as np

from gradlift import Reading, rules
from gradlift.rules import ScaleState

EVERY = [
    *rules.PRESETS,
    "static:8",
    "backoff:growth_interval=3,hysteresis=3,hysteresis_refill=streak,tolerance=0.2",
    "backoff:growth_interval=2,recover_below=64,recover_interval=1",
    "mpx:growth_interval=3",
    "mxnet:growth_interval=3",
    "metaseq:growth_interval=2",
    "headroom:margin_bits=2,leak=40",
]
STEPS = 300


def trace(seed=0):
    """Readings of all kinds: tiny, huge, zero, unknown, non-finite losses, empty steps."""
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        kind = rng.integers(12)
        amax = np.float32(2.0 ** rng.normal(2, 12))
        amax = {0: 0.0, 1: math.inf, 2: 2.0**-149, 3: math.nan}.get(kind, float(amax))
        yield Reading(
            nonfinite=bool(kind in (1, 4)),
            amax=amax,
            loss_nonfinite=bool(kind == 5),
            checked=bool(kind != 6),
            probe_amax=float(np.float32(2.0 ** rng.normal(2, 8))) if kind == 7 else math.nan,
        )


def expected(rule):
    state, states = rule.init(), []
    for reading in trace():
        state = rule.advance(state, reading)
        states.append(state)
    return states


def check(text, xp, array, jit=lambda f: f):
    """`array(value, kind)` makes a 0-d array of kind "float32", "int32" or "bool"."""
    rule = rules.parse(text)
    kinds = ["float32", *["int32"] * 6]
    state = ScaleState(*(array(x, k) for x, k in zip(rule.init(), kinds)))
    step = jit(lambda state, reading: rule.advance(state, reading, xp))
    for i, (reading, wanted) in enumerate(zip(trace(), expected(rule), strict=True)):
        r = Reading(
            nonfinite=array(reading.nonfinite, "bool"),
            amax=array(reading.amax, "float32"),
            loss_nonfinite=array(reading.loss_nonfinite, "bool"),
            checked=array(reading.checked, "bool"),
            norm=array(reading.norm, "float32"),
            probe_amax=array(reading.probe_amax, "float32"),
        )
        after = step(state, r)
        got = ScaleState(float(after.scale), *(int(x) for x in after[1:]))
        assert got == wanted, f"{text}, step {i}: {reading}"
        for before, now in zip(state, after):
            assert str(now.dtype).split(".")[-1] == str(before.dtype).split(".")[-1]
            assert tuple(now.shape) == ()
        state = after


def overflows(rng, scale):
    """One step's luck beside a peer: steered so that the scale stays in range."""
    return rng.random() < (0.0 if scale < 2.0**-8 else 0.1 if scale < 2.0**24 else 0.4)

"""A step that is not finite changes nothing, and says so."""

import keras
import numpy as np
import pytest
from helpers.keras import (
    BACKEND,
    BAD_LOSS,
    HUGE,
    LOSS_SEEN,
    NAN,
    OVERFLOW,
    SGD,
    WAYS,
    Adam,
    AdamW,
    bits,
    fit,
    lifted,
    line,
    step,
    weights,
)
from keras import ops

from gradlift import Cause, Verdict, read_journal
from gradlift.keras import LossScaleOptimizer, ScaleLogger


# What fit does
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_fit_skips_what_overflows_and_tells(how, tmp_path):
    optimizer = lifted()
    model = line(optimizer, **how)
    assert optimizer.result is None
    logger = ScaleLogger(tmp_path / "run.jsonl")
    fit(model, 0.5, 0.25, HUGE, 0.125, NAN, 0.5, callbacks=[logger])

    assert weights(model) == [-(0.5 + 0.25 + 0.125 + 0.5)]
    steps = read_journal(tmp_path / "run.jsonl").steps
    assert [s.cause for s in steps] == [0, 0, OVERFLOW, 0, BAD_LOSS, 0]
    after_nan = 128.0 if LOSS_SEEN else 64.0  # a non-finite loss keeps the scale, where it is seen
    assert [s.scale for s in steps] == [256, 256, 256, 128, 128, after_nan]
    assert optimizer.counts[Cause.NONE] == 4
    assert optimizer.counts[OVERFLOW] == (1 if LOSS_SEEN else 2)
    assert sum(optimizer.counts.values()) == 6
    assert optimizer.skipped_steps == 2
    assert int(optimizer.iterations) == 4
    assert float(optimizer.dynamic_scale.value) == after_nan
    result = optimizer.result
    assert (result.verdict, result.cause) == (Verdict.APPLY, Cause.NONE)
    assert (result.scale, result.grad_norm) == (after_nan, 0.5)


# What an optimizer keeps to itself
INNER = {
    "sgd": lambda: SGD(0.5, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: AdamW(0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
    "amsgrad": lambda: Adam(0.1, amsgrad=True, global_clipnorm=1.0),
    "lion": lambda: keras.optimizers.Lion(0.1, gradient_accumulation_steps=2, use_ema=True),
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(0.5, momentum=0.9), {".*b": Adam(0.1)})
    ),
}


def plainly(optimizer, variables):
    """A step without any scaling."""
    if BACKEND != "jax":
        return lambda *g: optimizer.apply([ops.convert_to_tensor(np.float32(x)) for x in g])
    import jax

    apply = jax.jit(optimizer.stateless_apply)

    def run(*g):
        held, weights = ([v.value for v in vs] for vs in (optimizer.variables, variables))
        moved, held = apply(held, [np.float32(x) for x in g], weights)
        for v, value in zip([*variables, *optimizer.variables], [*moved, *held], strict=True):
            v.assign(value)

    return run


def two():
    """Two variables, one with a -0.0 that a sum with +0.0 would lose."""
    first, second = np.float32([1, -0.0, 3]), np.float32([[2], [0]])
    return [keras.Variable(first, name="a"), keras.Variable(second, name="b")]


@pytest.mark.parametrize("inner", INNER)
def test_skips_leave_no_trace(inner):
    """Bad steps move not a bit; good ones, between them, are the inner optimizer's own."""
    rng = np.random.default_rng(0)
    grads = [(rng.standard_normal(3), rng.standard_normal((2, 1))) for _ in range(6)]
    plain, peer = INNER[inner](), two()
    plain.build(peer)
    run = plainly(plain, peer)
    ours, pair = LossScaleOptimizer(INNER[inner](), rule="dynamic:init_scale=2^8"), two()
    ours.build(pair)
    held, wanted = [*pair, *ours.inner_optimizer.variables], [*peer, *plain.variables]
    for a, b in grads:
        before = bits(held)
        for bad in ([*a[:2], np.inf], b), (a, b * np.nan):
            assert not step(ours, pair, *bad).stepped
            assert bits(held) == before
        step(ours, pair, a, b)
        run(a, b)
        if BACKEND == "jax":  # compiled as a whole, XLA may contract multiply-adds
            for x, y in zip(held, wanted, strict=True):
                np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=2e-6)
        else:
            assert bits(held) == bits(wanted)
    assert bits(pair) != bits(two())
    assert (ours.counts[Cause.NONE], ours.counts[Cause.OVERFLOW]) == (6, 12)
    assert float(ours.dynamic_scale.value) == 2.0 ** (8 - 12)


def test_averages_do_not_move_on_a_skip():
    optimizer = lifted(SGD(1.0, use_ema=True, ema_momentum=0.5))
    model = line(optimizer)
    fit(model, 1, HUGE, HUGE, 2)
    # Keras ends `fit` with the average in place of the weights: (-1) / 2 + (-3) / 2.
    assert weights(model) == [-2.0]


def test_schedules_count_applied_updates(tmp_path):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 2], [1.0, 0.5, 0.25])
    optimizer = lifted(SGD(schedule))
    model = line(optimizer)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=1)
    fit(model, 1, HUGE, HUGE, 1, 1, HUGE, 1, callbacks=[logger])
    assert weights(model) == [-(1 + 0.5 + 0.5 + 0.25)]
    assert int(optimizer.iterations) == 4
    rates = [s.lr for s in read_journal(tmp_path / "run.jsonl").steps]
    assert rates == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]  # each as it is after the step

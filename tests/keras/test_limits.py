"""A run that only skips is stopped."""

import warnings

import numpy as np
import pytest
from helpers.keras import (
    BACKEND,
    HUGE,
    NAN,
    SGD,
    fit,
    lifted,
    line,
    scaled,
    started,
    step,
    variable,
    weights,
)

from gradlift import Verdict, read_journal
from gradlift.core import Limits
from gradlift.errors import TrainingHalted
from gradlift.keras import LossScaleOptimizer, ScaleLogger


@pytest.mark.parametrize("every", [1, 8])
def test_limits_stop_a_run_that_only_skips(every, tmp_path):
    optimizer = lifted(max_consecutive_skips=2)
    model = line(optimizer)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=every)
    with pytest.raises(TrainingHalted, match="3 steps in a row were skipped, since step 1"):
        fit(model, 0.5, NAN, NAN, NAN, 0.5, 0.5, 0.5, 0.5, 0.5, callbacks=[logger])
    looked = {1: 4, 8: 8}[every] if BACKEND != "torch" else 4  # torch need not look
    assert optimizer.record.steps == len(read_journal(tmp_path / "run.jsonl").steps) == looked
    assert weights(model) == [-0.5 * (looked - 3)]
    run = read_journal(tmp_path / "run.jsonl")
    verdicts = [Verdict.APPLY, Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
    assert [s.verdict for s in run.steps] == verdicts + [Verdict.APPLY] * (looked - 4)
    assert [(e.what, e.step) for e in run.events] == [("skip", 1), ("skip", 2), ("halt", 3)]
    assert run.events[-1].detail["culprits"] == ["line/w/kernel (nan)"]


def test_limits_at_the_floor():
    """A look that comes late misses nothing."""
    rows = [0.5, HUGE * 8, 0.5, 0.5]
    rule = "dynamic:init_scale=2,min_scale=2"
    with pytest.raises(TrainingHalted, match=r"could not be applied \(step 1\).*floor"):
        model = line(lifted(rule=rule, on_floor="raise"))
        fit(model, *rows, callbacks=[ScaleLogger(every=8)])
    model = line(lifted(rule=rule, on_floor="warn"))
    with pytest.warns(UserWarning, match=r"smallest scale, 2\^1: .* gradient: line/w/kernel"):
        fit(model, *rows, callbacks=[ScaleLogger(every=8)])
    assert weights(model) == [-1.5]


def test_a_compiled_loop_enforces_what_it_skipped_over():
    """`enforce` concludes all steps since the last call, not the last one alone."""
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([w])
    for g in (1, NAN, NAN, 1):
        step(optimizer, [w], [g])
    optimizer.limits = Limits(max_consecutive_skips=1)
    with pytest.raises(TrainingHalted, match="since step 1"):
        optimizer.enforce()
    optimizer.enforce()  # each step once


def test_limits_in_a_loop_of_ones_own():
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8", max_consecutive_skips=1)
    optimizer.build([w])
    step(optimizer, [w], [NAN])
    step(optimizer, [w], None)
    step(optimizer, [w], [1])
    step(optimizer, [w], [NAN])
    with pytest.raises(TrainingHalted, match="2 steps in a row were skipped, since step 3"):
        step(optimizer, [w], [NAN])


def test_limits_are_enforced_once():
    """By the step itself where it runs in Python; then `ScaleLogger` has nothing to add."""
    optimizer, (w,) = started(rule="backoff:init_scale=8,min_scale=8", on_floor="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        optimizer.apply(scaled(optimizer, np.inf), [w])
        optimizer.enforce(optimizer.record)
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(said) == 1
    assert "non-finite gradients at the smallest scale, 2^3" in said[0]

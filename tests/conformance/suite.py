"""What every adapter must do. Import it into a framework's folder and give a `Driver` fixture.

    driver = Driver(rule, **limits)
    driver.step(loss, grads) -> (stepped, cause, scale, params)

`loss` is a float and `grads` a dict of *true* gradients (float32; empty: the step has none). A
driver puts them through the framework's own backward pass at the adapter's current scale, so that
what comes back is float16(gradient * scale), with inf where that overflows. Parameters are `a`
(4 elements) and `b` (2), all ones, moved by plain SGD with learning rate 1. Returned are whether
the step was applied, the Cause, the scale of the *next* step and the parameters as float32 arrays.

A driver whose adapter never sees the loss sets `sees_loss = False`; one whose adapter learns what
happened one step later sets `late = 1`, which matters to limits only.
"""

import math

import numpy as np
import pytest

from gradlift import Cause, Reading, rules
from gradlift.errors import TrainingHalted

SMALL = {"a": np.float32([2.0**-30, -(2.0**-28), 2.0**-26, 0]), "b": np.float32([2.0**-27, 1])}
UNIT = {"a": np.float32([0.5, -0.25, 0.125, 0]), "b": np.float32([0.25, 0.5])}
HUGE = {"a": np.float32([0.5, 0.5, 0.5, 1e6]), "b": np.float32([0.25, 0.5])}
NAN = {"a": np.float32([0.5, np.nan, 0, 0]), "b": np.float32([0.25, 0.5])}
START = {"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}


def same(params, expected):
    return all(
        np.asarray(params[n]).dtype == np.float32
        and (np.asarray(params[n]).view(np.int32) == expected[n].view(np.int32)).all()
        for n in expected
    )


def minus(params, grads):
    return {n: params[n] - grads[n] for n in params}


def known(driver, cause):
    return cause if getattr(driver, "sees_loss", True) else Cause.UNKNOWN_NONFINITE


def test_clean_steps_apply_the_true_gradient_exactly(Driver):
    driver, expected = Driver("static:2^10"), START
    for grads in (UNIT, UNIT):
        stepped, cause, scale, params = driver.step(1.0, grads)
        expected = minus(expected, grads)
        assert (stepped, cause, scale) == (True, Cause.NONE, 2.0**10)
        assert same(params, expected)


def test_scaling_saves_what_float16_loses(Driver):
    tiny = {n: np.float32(g * 2.0**-10) for n, g in SMALL.items()}  # down to 2^-40
    *_, params = Driver("static:2^24").step(1.0, tiny)
    assert same(params, minus(START, tiny))
    *_, params = Driver("static:1").step(1.0, tiny)
    lost = {n: np.where(abs(g) < 2.0**-24, 0, g).astype(np.float32) for n, g in tiny.items()}
    assert same(params, minus(START, lost))


def test_overflow_skips_and_lowers_the_scale(Driver):
    driver = Driver(rules.Backoff(init_scale=2.0**4, growth_interval=2))
    stepped, cause, scale, params = driver.step(1.0, HUGE)
    assert (stepped, cause, scale) == (False, known(driver, Cause.OVERFLOW), 8.0)
    assert same(params, START)
    stepped, cause, scale, params = driver.step(1.0, UNIT)
    assert (stepped, cause, scale) == (True, Cause.NONE, 8.0)
    assert same(params, minus(START, UNIT))
    assert driver.step(1.0, UNIT)[2] == 16.0


def test_nan_gradients_are_an_overflow(Driver):
    driver = Driver(rules.Backoff(init_scale=16))
    stepped, cause, scale, params = driver.step(1.0, NAN)
    assert (stepped, cause, scale) == (False, known(driver, Cause.OVERFLOW), 8.0)
    assert same(params, START)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_keeps_the_scale(Driver, loss):
    driver = Driver(rules.Backoff(init_scale=16, growth_interval=2))
    if not getattr(driver, "sees_loss", True):
        stepped, cause, scale, _ = driver.step(loss, NAN)
        assert (stepped, cause, scale) == (False, Cause.UNKNOWN_NONFINITE, 8.0)
        return
    driver.step(1.0, UNIT)
    for _ in range(20):
        stepped, cause, scale, params = driver.step(loss, NAN)
        assert (stepped, cause, scale) == (False, Cause.LOSS_NONFINITE, 16.0)
        assert same(params, minus(START, UNIT))
    assert driver.step(1.0, UNIT)[2] == 32.0
    assert driver.step(1.0, HUGE)[1:3] == (Cause.OVERFLOW, 16.0)  # a loss is that of one step


def test_a_step_without_gradients_counts_as_neither(Driver):
    driver = Driver(rules.Backoff(init_scale=16, growth_interval=2))
    driver.step(1.0, UNIT)
    stepped, cause, scale, params = driver.step(1.0, {})
    assert (stepped, cause, scale) == (False, Cause.NO_GRADIENTS, 16.0)
    assert same(params, minus(START, UNIT))
    assert driver.step(1.0, UNIT)[2] == 32.0


def test_the_floor_holds(Driver):
    driver = Driver(rules.Backoff(init_scale=16, min_scale=8))
    causes = [driver.step(1.0, NAN)[1] for _ in range(3)]
    assert causes == [known(driver, Cause.OVERFLOW), Cause.FLOOR, Cause.FLOOR]
    stepped, _, scale, params = driver.step(1.0, UNIT)
    assert (stepped, scale) == (True, 8.0)
    assert same(params, minus(START, UNIT))


def test_a_static_scale_skips_and_stays(Driver):
    driver = Driver("static:16")
    stepped, cause, scale, params = driver.step(1.0, HUGE)
    assert (stepped, cause, scale) == (False, known(driver, Cause.OVERFLOW), 16.0)
    assert same(params, START)


def test_off_checks_nothing(Driver):
    stepped, cause, scale, params = Driver("off").step(1.0, NAN)
    assert (stepped, cause, scale) == (True, Cause.NONE, 1.0)
    assert np.isnan(params["a"][1])


def test_limits_halt(Driver):
    if "limits" in getattr(Driver, "CANNOT", {}):
        pytest.skip(Driver.CANNOT["limits"])
    driver = Driver("dynamic", max_consecutive_skips=2)
    driver.step(1.0, NAN)
    driver.step(1.0, NAN)
    with pytest.raises(TrainingHalted, match="3 steps in a row were skipped, since step 0"):
        for _ in range(1 + getattr(driver, "late", 0)):
            driver.step(1.0, NAN)
    driver = Driver(rules.Backoff(init_scale=16, min_scale=16), on_floor="raise")
    with pytest.raises(TrainingHalted, match="as low as it may go"):
        for _ in range(1 + getattr(driver, "late", 0)):
            driver.step(1.0, NAN)


def random_steps(seed, steps):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        level = 2.0 ** rng.normal(-4, 5)
        grads = {n: np.float32(level * rng.standard_normal(g.shape)) for n, g in UNIT.items()}
        if rng.random() < 0.03:
            grads["b"][0] = rng.choice([np.nan, np.inf])
        yield (math.nan if rng.random() < 0.03 else 1.0), ({} if rng.random() < 0.03 else grads)


@pytest.mark.parametrize(
    "rule",
    [
        "dynamic:growth_interval=5",
        "megatron:growth_interval=5",
        "deepspeed:growth_interval=5",
        "mxnet:growth_interval=5",
        "metaseq:growth_interval=3",
        "fairseq:growth_interval=5,tolerance=0.2",
        "auto:sharp",
        "auto:cautious",
    ],
)
def test_the_scales_are_the_cores(Driver, rule):
    """Readings made here, advanced on Python numbers, give the adapter's scales to the bit."""
    driver = Driver(rule)
    sees_loss = getattr(driver, "sees_loss", True)
    rule = rules.parse(rule)
    state = rule.init()
    for loss, grads in random_steps(0, 120):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = [np.float16(g * np.float32(state.scale)).ravel() for g in grads.values()]
        flat = np.concatenate([np.zeros(0, np.float16), *scaled])
        finite = flat[np.isfinite(flat)]
        reading = Reading(
            nonfinite=len(finite) < len(flat),
            amax=float(abs(finite).max(initial=0)),
            loss_nonfinite=sees_loss and not math.isfinite(loss),
            checked=bool(grads),
        )
        state = rule.advance(state, reading)
        assert driver.step(loss, grads)[2] == state.scale

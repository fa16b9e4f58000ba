"""The NumPy adapter's own: clipping, masters, retry, journal, state, refusals."""

import json
import math

import numpy as np
import pytest

import gradlift.numpy as gl
from gradlift import Cause, Journal, Verdict, read_journal, replay
from gradlift.errors import SettingsError, StateError


def sgd(weights, grads):
    for name, g in grads.items():
        if g is not None:
            weights[name] -= g


def test_clipping_sees_true_gradients_and_the_true_norm():
    scaler = gl.Scaler("static:2^10")
    weights = {"w": np.zeros(2, np.float32)}
    grads = {"w": np.float32([3, 4]) * 2**10}
    result = scaler.step(weights, grads, sgd, max_norm=1.0)
    assert result.grad_norm == 5.0
    np.testing.assert_allclose(weights["w"], [-0.6, -0.8], rtol=1e-6)  # torch's 1e-6 in the norm
    result = scaler.step(weights, {"w": np.float32([0.3, 0]) * 2**10}, sgd, max_norm=1.0)
    assert weights["w"][0] == np.float32(-0.6) - np.float32(0.3) or result.stepped


def test_no_rounding_below_the_clipping_norm():
    rng = np.random.default_rng(0)
    g = rng.standard_normal(1000).astype(np.float32)
    true = gl.unscale({"w": g * np.float32(2**13)}, 2.0**13, max_norm=1e9, norm=1.0)
    assert (true["w"] == g).all()


def test_what_is_used_is_checked():
    """Finite scaled gradients that leave float32 when the scale is taken out are not applied."""
    scaler = gl.Scaler("static:2^-20")
    weights = {"w": np.ones(1, np.float32)}
    result = scaler.step(weights, {"w": np.float32([3e38])}, sgd)
    assert not result.stepped
    assert weights["w"] == 1


def test_masters_keep_what_float16_would_lose():
    half = {"w": np.ones(1, np.float16)}
    masters, scaler = gl.Masters(half), gl.Scaler("static:2^10")
    for _ in range(1000):
        scaler.step(masters, {"w": np.float16([-1e-4 * 2**10])}, sgd)
    assert half["w"][0] == pytest.approx(1.1, abs=1e-3)
    assert half["w"].dtype == np.float16


def batch(peak):
    def compute(scale):
        with np.errstate(over="ignore"):
            return 1.0, {"w": np.float16([peak * scale])}

    return compute


def test_retry_loses_no_batch_and_equals_a_run_that_started_there(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("dynamic", journal=journal)
        weights = {"w": np.ones(1, np.float32)}
        result = scaler.train_step(batch(8.0), weights, sgd, retries=5)
    assert (result.verdict, result.retries, result.scale) == (Verdict.APPLY, 4, 2.0**12)
    other = {"w": np.ones(1, np.float32)}
    gl.Scaler("dynamic:init_scale=2^12").train_step(batch(8.0), other, sgd)
    assert weights["w"] == other["w"] == -7.0
    run = read_journal(tmp_path / "run.jsonl")
    assert [e.what for e in run.events] == ["retry"] * 4
    assert run.events[0].detail["culprits"] == ["w (inf)"]
    assert run.steps[0].retries == 4


def test_retries_run_out():
    weights = {"w": np.ones(1, np.float32)}
    result = gl.Scaler("dynamic").train_step(batch(8.0), weights, sgd, retries=3)
    assert (result.verdict, result.cause, result.retries) == (Verdict.SKIP, Cause.OVERFLOW, 3)
    assert weights["w"] == 1


def test_a_dead_loss_is_not_retried():
    calls = []

    def compute(scale):
        calls.append(scale)
        return math.nan, {"w": np.float16([np.nan])}

    result = gl.Scaler("dynamic").train_step(compute, {"w": np.ones(1, np.float32)}, sgd, retries=3)
    assert (result.cause, len(calls)) == (Cause.LOSS_NONFINITE, 1)


def train(journal=None, steps=60):
    rng = np.random.default_rng(0)
    scaler = gl.Scaler("auto", journal=journal)
    weights = {"w": np.zeros(8, np.float32), "b": np.zeros(1, np.float32)}
    for _ in range(steps):
        g = rng.standard_normal(9).astype(np.float32) * 2.0 ** rng.normal(0, 4)
        with np.errstate(over="ignore"):
            scaled = np.float16(g * scaler.get_scale())
        scaler.scale(float(abs(g).sum()))
        scaler.step(weights, {"w": scaled[:8], "b": scaled[8:]}, sgd, max_norm=1.0)
    return weights, scaler


def test_recording_changes_no_bit_and_the_run_replays(tmp_path):
    plain, _ = train()
    with Journal(tmp_path / "run.jsonl") as journal:
        recorded, scaler = train(journal)
    assert all((plain[n] == recorded[n]).all() for n in plain)
    run = read_journal(tmp_path / "run.jsonl")
    assert len(run.steps) == 60
    assert run.skipped == scaler.skipped_steps > 0
    again = replay(run, "auto:cautious")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]


def test_a_window_with_losses_of_inf_and_minus_inf_is_recorded(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("static:1", journal=journal)
        scaler.scale(math.inf)
        scaler.scale(-math.inf)
        result = scaler.step({"w": np.zeros(1)}, {"w": np.float32([np.nan])}, sgd)
    assert (result.cause, result.micro_batch) == (Cause.LOSS_NONFINITE, 0)
    assert math.isnan(read_journal(tmp_path / "run.jsonl").steps[0].loss)


def test_a_path_is_a_journal(tmp_path):
    train(tmp_path / "run.jsonl", steps=3)
    train(str(tmp_path / "run.jsonl"), steps=3)
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 6


def test_state_resumes_to_the_bit():
    _, scaler = train(steps=30)
    data = json.loads(json.dumps(scaler.state_dict()))
    fresh = gl.Scaler("auto")
    fresh.load_state_dict(data)
    assert fresh.state == scaler.state
    assert (fresh.steps, fresh.skipped_steps) == (scaler.steps, scaler.skipped_steps)


def test_the_header_has_the_rule_of_a_state_that_was_loaded(tmp_path):
    sharp = gl.Scaler("auto")
    sharp.train_step(batch(1.0), {"w": np.ones(1, np.float32)}, sgd, retries=1)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("auto", journal=journal)
        scaler.load_state_dict(sharp.state_dict())
        scaler.train_step(batch(1.0), {"w": np.ones(1, np.float32)}, sgd)
    assert read_journal(tmp_path / "run.jsonl").header["rule"] == "headroom"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: None,
        lambda d: {},
        lambda d: {**d, "gradlift": {**d["gradlift"], "schema": 9}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "steps": -1}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "skipped": "3"}},
        lambda d: {**d, "gradlift": {**d["gradlift"], "rule": "backoff"}},
        lambda d: {**d, "gradlift": {"schema": 1, "rule": "headroom"}},
        lambda d: {**d, "scale": math.nan},
        lambda d: {**d, "_growth_tracker": "many"},
    ],
)
def test_damaged_state_changes_nothing(damage):
    scaler = gl.Scaler("auto")
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict(damage(scaler.state_dict()))
    assert scaler.state_dict() == before


def test_refusals_name_the_parameter():
    with pytest.raises(SettingsError, match="gradient of 'w' is int64"):
        gl.inspect({"w": np.array([1])})
    with pytest.raises(SettingsError, match="gradient of 'w' is complex64"):
        gl.inspect({"w": np.zeros(1, np.complex64)})


def test_floor_warns_where_asked():
    scaler = gl.Scaler("backoff:init_scale=8,min_scale=8", on_floor="warn")
    with pytest.warns(
        UserWarning, match=r"at the smallest scale, 2\^3.*First non-finite gradient: w"
    ):
        scaler.step({"w": np.ones(1)}, {"w": np.float16([np.inf])}, sgd)


def test_single_arrays_and_missing_gradients():
    w = np.ones(2, np.float32)
    scaler = gl.Scaler("static:4")
    scaler.step(w, np.float16([4, 8]), lambda w, g: np.subtract(w, g, out=w))
    assert (w == [0, -1]).all()
    weights = {"w": np.ones(1, np.float32), "frozen": np.ones(1, np.float32)}
    scaler.step(weights, {"w": np.float16([4]), "frozen": None}, sgd)
    assert (weights["w"], weights["frozen"]) == (0, 1)


def test_off_clips_where_asked_and_a_bad_norm_is_refused():
    weights = {"w": np.zeros(1, np.float32)}
    gl.Scaler("off").step(weights, {"w": np.float32([100.0])}, sgd, max_norm=1.0)
    assert weights["w"][0] == pytest.approx(-1.0)
    for rule in ("off", "dynamic"):
        with pytest.raises(SettingsError, match="max_norm is -1"):
            gl.Scaler(rule).step(weights, {"w": np.float32([100.0])}, sgd, max_norm=-1)


def test_a_step_that_raised_leaves_no_loss_behind():
    scaler, weights = gl.Scaler("static:1"), {"w": np.zeros(1, np.float32)}
    scaler.scale(math.nan)
    with pytest.raises(SettingsError):
        scaler.step(weights, {"w": np.array([1])}, sgd)
    scaler.scale(1.0)
    assert scaler.step(weights, {"w": np.float32([1.0])}, sgd).stepped


def test_a_vector_loss_in_float16_is_judged_by_its_elements():
    scaler, weights = gl.Scaler("static:1"), {"w": np.zeros(1, np.float32)}
    scaler.scale(np.full(2000, 100.0, np.float16))
    assert scaler.step(weights, {"w": np.float32([1.0])}, sgd).stepped


@pytest.mark.parametrize("retries", range(7))
def test_a_sound_first_batch_is_never_lost_by_trying_a_higher_scale(retries):
    def compute(scale):  # finite up to 2^17, and far below that as far as amax shows
        gradient = np.inf if scale > 2.0**17 else 6e-6 * scale
        return 1.0, {"w": np.float32([gradient])}

    scaler = gl.Scaler("auto")
    result = scaler.train_step(compute, {"w": np.ones(1)}, lambda w, g: None, retries=retries)
    assert result.stepped

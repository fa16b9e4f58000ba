"""Replay: the same rule gives the same run; another rule what it would have done."""

import math
import random
import tempfile

import numpy as np
import pytest

import gradlift.numpy
from gradlift import Cause, Journal, Reading, Verdict, read_journal, replay, rules
from gradlift.core import decide
from gradlift.journal import Run, Step


def record(rule, peaks, bad_losses=(), empty=()):
    """A run as an adapter would record it, with real overflow."""
    rule = rules.parse(rule)
    state, steps = rule.init(), []
    for i, peak in enumerate(peaks):
        scaled = peak * state.scale
        bad = scaled >= 65520 or i in bad_losses
        reading = Reading(bad, math.inf if bad else scaled, i in bad_losses, checked=i not in empty)
        verdict, cause = decide(reading, state, rule)
        after = rule.advance(state, reading)
        steps.append(
            Step(
                i,
                state.scale,
                after.scale,
                amax=reading.amax,
                nonfinite=bad,
                verdict=verdict,
                cause=cause,
            )
        )
        state = after
    return Run(header={"rule": str(rule)}, steps=steps)


def noise(n, seed=0, centre=0.0):
    rng = random.Random(seed)
    return [2.0 ** rng.gauss(centre, 1.5) for _ in range(n)]


@pytest.mark.parametrize(
    "rule", ["torch:growth_interval=20", "megatron:growth_interval=9", "auto:sharp", "mxnet"]
)
def test_the_same_rule_gives_the_same_run(rule):
    run = record(rule, noise(2000), bad_losses={5, 6, 700}, empty={9, 701})
    again = replay(run, rule)
    assert run.skipped > 0
    assert again.undecided == 0
    for a, b in zip(again.steps, run.steps, strict=True):
        assert (a.scale, a.next_scale, a.verdict, a.cause) == (
            b.scale,
            b.next_scale,
            b.verdict,
            b.cause,
        )


def test_a_clean_run_tells_everything_about_another_rule():
    peaks = noise(1000)
    recorded, truth = record("static:2^4", peaks), record("torch:growth_interval=20", peaks)
    assert recorded.skipped == 0
    again = replay(recorded, "torch:growth_interval=20")
    assert again.undecided == 0
    assert [s.scale for s in again.steps] == [s.scale for s in truth.steps]
    assert [s.verdict for s in again.steps] == [s.verdict for s in truth.steps]
    assert again.skipped == truth.skipped > 10
    assert again.header["replay_of"] == "static:16"
    assert all(e.what == "skip" for e in again.events)


def test_an_overflow_is_unknown_below_its_scale_and_certain_above():
    run = record("static:2^16", [4.0, 0.001])
    assert run.skipped == 1
    below, above = replay(run, "static:2^15"), replay(run, "static:2^17")
    assert [s.verdict for s in below.steps] == [None, Verdict.APPLY]
    assert below.undecided == 1
    assert below.events[0].detail["code"] == "undecided"
    assert [s.verdict for s in above.steps] == [Verdict.SKIP, Verdict.APPLY]
    assert replay(below, "static:2^17").undecided == 1  # what was not known stays unknown


def test_steps_without_amax():
    run = Run(steps=[Step(0, 8.0, 8.0)])
    assert replay(run, "static:4").undecided == 0
    assert replay(run, "static:16").undecided == 1


def test_retries():
    run = record("static:1", [64.0] * 3)
    plain = replay(run, "dynamic")
    retried = replay(run, "dynamic", retries=10)
    assert plain.skipped == 3
    assert retried.skipped == 0
    assert retried.steps[0].retries == 7
    assert retried.steps[0].scale == 2.0**9  # 64 * 2^10 = 65536 overflows


def test_auto_is_sharp_only_with_retries():
    run = record("static:1", noise(9))
    assert replay(run, "auto").header["rule"] == str(rules.parse("auto:cautious"))
    assert replay(run, "auto", retries=4).header["rule"] == str(rules.parse("auto:sharp"))


def test_retries_are_those_of_the_core():
    """The same tries, scales and counts as the NumPy adapter's, which computes them for real."""
    peaks = noise(200, centre=-3)

    def live(path, rule, retries):
        with Journal(path) as journal, np.errstate(over="ignore"):
            scaler = gradlift.numpy.Scaler(rule, journal=journal)
            for peak in peaks:
                step = lambda scale, peak=peak: (
                    1.0,
                    {"w": np.float32([peak * scale]).astype("f2")},
                )
                scaler.train_step(step, {"w": np.zeros(1)}, lambda w, g: None, retries=retries)
        return read_journal(path)

    for rule in ("auto:init_scale=2^-20", "dynamic:init_scale=2^24,growth_interval=20"):
        again = replay(record("static:2^-9", peaks), rule, retries=3)
        with tempfile.TemporaryDirectory() as folder:
            run = live(f"{folder}/run.jsonl", rule, 3)
        assert run.skipped == again.skipped
        assert run.steps[0].retries > 0  # up from a scale that was too low, down from one too high
        for a, b in zip(again.steps, run.steps, strict=True):
            assert (a.scale, a.next_scale, a.retries, a.verdict) == (
                b.scale,
                b.next_scale,
                b.retries,
                b.verdict,
            )


def test_causes_survive():
    run = record("static:8", [1.0] * 3, bad_losses={1}, empty={2})
    causes = [s.cause for s in replay(run, "static:4").steps]
    assert causes == [Cause.NONE, Cause.LOSS_NONFINITE, Cause.NO_GRADIENTS]


def test_from_a_file_and_back(tmp_path):
    run = record("static:2^4", noise(50))
    with Journal(tmp_path / "run.jsonl") as journal:
        journal.describe(rule="static:2^4")
        for step in run.steps:
            journal.step(step)
    again = replay(tmp_path / "run.jsonl", "auto")
    with Journal(tmp_path / "again.jsonl") as journal:
        for step in again.steps:
            journal.step(step)
    back = read_journal(tmp_path / "again.jsonl")
    assert [s.scale for s in back.steps] == [s.scale for s in again.steps]


def test_an_empty_run():
    assert replay(Run(), "auto").steps == []


def test_a_clean_step_is_clean_at_its_own_scale_however_large_its_gradients():
    """float32 gradients may well be larger than float16's largest number."""
    run = Run(steps=[Step(0, 8.0, 8.0, amax=1e6)])
    assert replay(run, "static:8").skipped == 0
    assert replay(run, "static:4").skipped == 0
    assert replay(run, "static:16").skipped == 1


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_a_rule_that_needs_amax_is_not_given_a_guess(amax):
    run = Run(steps=[Step(i, 8.0, 8.0, amax=amax) for i in range(5)])
    for rule in ("auto:init_scale=8", "auto:cautious,init_scale=8"):
        again = replay(run, rule)
        assert again.undecided == 5
        assert again.steps[-1].next_scale == 8.0
    assert replay(run, "dynamic:init_scale=8").undecided == 0


def test_each_key_is_replayed_by_itself():
    a, b = (
        record("torch:growth_interval=5", noise(40)),
        record("torch:growth_interval=5", noise(40, 1)),
    )
    both = [s._replace(key=k) for pair in zip(a.steps, b.steps) for k, s in zip("ab", pair)]
    again = replay(Run(steps=both), "torch:growth_interval=5")
    assert [s.scale for s in again.steps] == [s.scale for s in both]

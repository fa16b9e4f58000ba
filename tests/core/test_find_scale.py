"""Static scales for gradients whose exponents are known exactly."""

import json
import math
import subprocess
import sys

import pytest

from gradlift.analysis.exponents import parameters, sampled
from gradlift.analysis.static_scale import find_scale
from gradlift.core import Cause, Verdict
from gradlift.formats import FP16
from gradlift.journal import Event, Journal, Run, Sample, Step


def sample(step, exponents, zeros=0):
    n = sum(exponents.values()) + zeros
    counts = {str(e): c for e, c in exponents.items()}
    return Sample(step, {"w": {"elements": n, "zero": zeros / n, "exponents": counts}})


def recorded(exponents, scale=1.0, steps=8, zeros=0):
    """The same true exponents at every step, recorded at `scale`."""
    shift = round(math.log2(scale))
    as_scaled = {e + shift: c for e, c in exponents.items()}
    amax = 2.0 ** max(as_scaled) * 1.5
    return Run(
        steps=[Step(i, scale, scale, amax=amax) for i in range(steps)],
        samples=[sample(i, as_scaled, zeros) for i in range(steps)],
    )


def at(advice, k, name="FP16"):
    [candidate] = [c for c in advice.candidates if c.scale == 2.0**k]
    return candidate.formats[name]


def test_small_gradients_want_a_scale():
    advice = find_scale(recorded({-30: 50, -20: 50}))
    assert advice.verdict == "static"
    # 2^-19 times 2^32 is 2^13, three bits below 2^16.
    assert advice.scale == 2.0**32
    assert "just below 2^-19; 2^32 leaves 3 bits above" in advice.reason
    assert "without a scale: 100%" in advice.reason


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-5])
def test_the_scale_of_the_recording_is_taken_out(scale):
    assert find_scale(recorded({-30: 50, -20: 50}, scale)).scale == 2.0**32


def test_gradients_in_range_need_none():
    advice = find_scale(recorded({-14: 1, -10: 99, 0: 100}))
    assert (advice.verdict, advice.scale) == ("none", 1.0)
    assert "you need none" in advice.reason
    assert find_scale(recorded({-15: 2, -10: 198})).verdict == "none"  # 1 % below: little
    assert find_scale(recorded({-15: 3, -10: 197})).verdict == "static"


def test_large_gradients_want_a_scale_below_one():
    advice = find_scale(recorded({12: 100, 14: 100}))
    assert (advice.verdict, advice.scale) == ("static", 2.0**-2)
    assert find_scale(recorded({12: 100})).verdict == "none"  # just three bits above


def test_a_range_that_is_too_wide():
    advice = find_scale(recorded({-40: 50, 0: 50}))
    assert (advice.verdict, advice.scale) == ("no single scale", None)
    assert "50.0% of the elements" in advice.reason
    assert 'rule="auto"' in advice.reason


def test_a_scale_must_fit_every_part_of_a_run():
    """Gradients fall from 2^0 to 2^-30 in the last quarter: on average few are lost."""
    run = recorded({0: 1000}, steps=8)
    run.samples[6:] = [sample(i, {-30: 10, 0: 1}) for i in (6, 7)]
    assert find_scale(run).verdict == "no single scale"


def test_a_part_of_a_run_is_a_quarter():
    """What an eighth of the run loses is little in its quarter: 30 of 4030."""
    run = recorded({0: 1000}, steps=16)
    run.samples[14:] = [sample(i, {-30: 15, 0: 1000}) for i in (14, 15)]
    assert find_scale(run).verdict == "none"


def test_the_largest_gradient_counts_even_between_samples():
    run = recorded({-20: 100}, steps=8)
    run.steps[3] = run.steps[3]._replace(amax=2.0**-10)
    run.samples.pop(3)
    assert find_scale(run).scale == 2.0**22
    assert at(find_scale(run), 26).steps == 1 / 8
    assert at(find_scale(run), 26).overflowed == 0.0


def test_shares_of_each_format():
    advice = find_scale(recorded({-30: 10, -20: 20, -12: 30, -5: 40}))
    assert at(advice, 0) == (0.1, 0.2, 0.0, 0.0)
    assert at(advice, 0, "BF16") == (0.0, 0.0, 0.0, 0.0)
    # E4M3: normal from 2^-6, its smallest number is 2^-9, and 2^-10 is still rounded up to it.
    assert at(advice, 0, "E4M3") == (0.6, 0.0, 0.0, 0.0)
    assert at(advice, 4, "E4M3") == (0.3, 0.3, 0.0, 0.0)
    assert at(advice, 14, "E4M3") == (0.1, 0.0, 0.4, 1.0)
    # E5M2: normal from 2^-14, its smallest number is 2^-16.
    assert at(advice, 0, "E5M2") == (0.3, 0.0, 0.0, 0.0)
    assert at(advice, 4, "E5M2")[:2] == (0.1, 0.2)


def test_the_edges_are_those_of_the_format():
    """What the shares say of a binade is what rounding does to the numbers in it."""
    advice = find_scale(recorded({-26: 1, -25: 1, -24: 1, -15: 1, -14: 1}))
    assert at(advice, 0) == (0.2, 0.6, 0.0, 0.0)
    assert FP16.flushes(2.0**-26 * 1.5)
    assert not FP16.flushes(2.0**-25 * 1.5)
    advice = find_scale(recorded({15: 1, 0: 1}))
    assert at(advice, 0).overflowed == 0.0
    assert at(advice, 0).steps == 0.0
    assert find_scale(recorded({16: 1, 0: 1})).candidates[0].scale == 2.0**-4
    assert at(find_scale(recorded({16: 1, 0: 1})), 0)[2:] == (0.5, 1.0)


def test_overflowed_steps_and_their_samples_are_left_out():
    run = recorded({-20: 100}, steps=8)
    bad = {"nonfinite": True, "verdict": Verdict.SKIP, "cause": Cause.OVERFLOW}
    run.steps[3] = run.steps[3]._replace(amax=60000.0, **bad)
    run.samples[3] = sample(3, {10: 100})
    assert find_scale(run).scale == 2.0**32


def test_the_scale_of_a_sample_is_unknown_if_two_losses_have_two_scales():
    one = recorded({-20: 100})
    two = [s._replace(scale=2.0**8, next_scale=2.0**8, key="d") for s in one.steps]
    both = Run(steps=one.steps + two, samples=one.samples)
    assert find_scale(both).verdict == "unknown"
    assert all(not p.true for p in parameters(both))  # the report does not guess either
    same = [s._replace(key="d") for s in one.steps]
    assert find_scale(Run(steps=one.steps + same, samples=one.samples)).scale == 2.0**32


def test_a_sample_of_a_retried_step_has_the_scale_of_its_try():
    """Two samples of one number: the first is the try that overflowed, and is left out."""
    run = recorded({-20: 100})
    run.samples.insert(0, sample(0, {10: 100}))
    run.events.append(Event(0, "retry", {"scale": 2.0**30}))
    assert find_scale(run).scale == 2.0**32
    assert [s.scale for s in sampled(run)][:2] == [2.0**30, 1.0]


def test_a_run_that_cannot_tell():
    for run in (Run(), Run(steps=[Step(0, 8.0, 8.0, amax=1.0)]), Run(samples=[sample(0, {0: 1})])):
        advice = find_scale(run)
        assert (advice.verdict, advice.scale, advice.candidates) == ("unknown", None, ())
        assert "--every" in advice.reason
    all_zero = Run(steps=[Step(0, 8.0, 8.0, amax=0.0)], samples=[sample(0, {}, zeros=5)])
    assert find_scale(all_zero).verdict == "unknown"


def test_zeros_may_have_been_flushed():
    assert "50.0% of the elements were zero" in find_scale(recorded({0: 5}, zeros=5)).reason
    assert "zero" not in find_scale(recorded({0: 6}, zeros=5)).reason


# the command


def command(*arguments):
    words = [sys.executable, "-m", "gradlift", "find-scale", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_find_scale_prints_candidates_and_one_recommendation(tmp_path):
    run = recorded({-30: 50, -20: 50})
    with Journal(tmp_path / "journal.jsonl") as journal:
        for step, shares in zip(run.steps, run.samples):
            journal.sample(shares.step, shares.parameters)
            journal.step(step)
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["2^32"])
    assert row == ["2^32", "0/0/0", "0/0/0", "0/0/50.0", "0/0/0", "0", "<-"]
    assert "Use 2^32.\n" in done.stdout
    told = json.loads(command(tmp_path, "--json").stdout)
    assert (told["verdict"], told["scale"]) == ("static", 2.0**32)
    assert told["candidates"][0]["formats"]["FP16"]["flushed"] == 0.5


def test_find_scale_on_a_run_without_samples_and_on_none(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    done = command(tmp_path / "empty.jsonl")
    assert done.returncode == 0
    assert "Not known." in done.stdout
    assert command(tmp_path / "nowhere").returncode == 2

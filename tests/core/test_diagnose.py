"""Findings, one story each: just enough for it, and just not."""

import json
import math
import subprocess
import sys

import pytest

from gradlift import Cause, Verdict, replay
from gradlift.analysis.diagnosis import diagnose
from gradlift.analysis.findings import CHECKS
from gradlift.journal import Call, Calls, Event, Journal, Run, Sample, Step, read_journal

BAD = {"nonfinite": True, "verdict": Verdict.SKIP, "cause": Cause.OVERFLOW}


def kinds(run):
    return [f.kind for f in diagnose(run)]


def only(run):
    [finding] = diagnose(run)
    assert finding.evidence
    assert any(c.isdigit() for c in finding.evidence)
    assert finding.advice
    return finding


def clean(n, scale=1024.0, start=0, **facts):
    return [Step(start + i, scale, scale, amax=1000.0, norm=1.0, **facts) for i in range(n)]


def numbered(steps):
    return [s._replace(step=i) for i, s in enumerate(steps)]


def skips(n, scale, culprits=("a.weight",), **facts):
    """n overflows in a row, each of which halves the scale."""
    return [
        Step(0, scale / 2**i, scale / 2 ** (i + 1), culprits=culprits, **{**BAD, **facts})
        for i in range(n)
    ]


def sampled(steps, every=5, **layers):
    """A run with the same shares of each layer in every sample."""
    return Run(
        steps=steps, samples=[Sample(s.step, {**layers}) for s in steps if s.step % every == 0]
    )


def gradient(exponents, zeros=0):
    total = sum(exponents.values()) + zeros
    return {
        "elements": total,
        "zero": zeros / total,
        "subnormal": sum(c for e, c in exponents.items() if e < -14) / total,
        "near_max": 0.0,
        "exponents": {str(e): c for e, c in exponents.items()},
    }


GOOD = gradient({-3: 50, 0: 40, 2: 10})


# nothing to find


def test_nothing_is_known_of_an_empty_run():
    assert diagnose(Run()) == []
    assert diagnose(Run(steps=[Step(0, 8.0, 8.0)])) == []
    assert diagnose(Run(events=[Event(None, "note", {"text": "hello"})])) == []


@pytest.mark.parametrize(
    "rule",
    [
        "dynamic",
        "dynamic:init_scale=2^22",
        "auto",
        "megatron:init_scale=2^16",
        "megatron:init_scale=2^16,growth_interval=200",
    ],
)
def test_a_dynamic_scale_at_work_is_healthy(rule):
    """Gradients of 1 +- noise for 20,000 steps: a few overflows at the start, then one in 2,000."""
    true = [
        Step(i, 2.0**-20, 2.0**-20, amax=2.0**-20 * (1 + (i * 37 % 100) / 100))
        for i in range(20000)
    ]
    run = replay(Run(steps=true), rule)
    steps = [
        s._replace(norm=1.0, lr=1e-3, culprits=("head.weight",) if s.nonfinite else ())
        for s in run.steps
    ]
    if rule.startswith("dynamic"):
        assert run.skipped >= 5
    assert diagnose(sampled(steps, 100, **{"head.weight": GOOD})) == []


def test_every_check_has_a_kind_of_its_own():
    names = [check.__name__.replace("_", "-") for check in CHECKS]
    assert len(set(names)) == len(names)


# overflows


def thrashing(cycles, clean_steps):
    one = clean(clean_steps, 1024.0)
    one[-1] = one[-1]._replace(next_scale=2048.0)
    one.append(Step(0, 2048.0, 1024.0, culprits=("a.weight",), **BAD))
    return Run(steps=numbered(one * cycles))


def test_thrash():
    finding = only(thrashing(5, 10))
    assert (finding.kind, finding.severity) == ("thrash", "warning")
    assert "raised to 2^11 and overflowed there 5 times in 45 steps" in finding.evidence
    assert finding.parameters == ("a.weight",)
    assert finding.steps == (10, 21, 32, 43, 54)
    assert 'rule="auto"' in finding.advice
    assert 'rule="static:2^10"' in finding.advice
    assert diagnose(thrashing(4, 10)) == []  # the search for a scale
    assert kinds(thrashing(30, 45)) == ["thrash"]
    assert diagnose(thrashing(30, 60)) == []  # one step in 61: what raising a scale costs


def test_thrash_with_hysteresis():
    """Two overflows until the scale is lowered are still one time that it was raised."""
    steps = [
        s
        for s in thrashing(5, 10).steps
        for s in (s, s._replace(next_scale=s.scale))[: 1 + s.nonfinite]
    ]
    assert "overflowed there 5 times" in only(Run(steps=numbered(steps))).evidence
    assert "thrash" not in kinds(Run(steps=numbered(steps[: 4 * 12])))


def test_a_scale_that_decays_without_end():
    run = Run(steps=numbered(clean(100, 65536.0) + skips(20, 65536.0)))
    finding = only(run)
    assert (finding.kind, finding.severity) == ("floor", "broken")
    assert "last 20 steps of 120 were all skipped (since step 100)" in finding.evidence
    assert "from 2^16 to 2^-4; a.weight was the first" in finding.evidence
    shorter = Run(steps=numbered(clean(500, 65536.0) + skips(19, 65536.0)))
    assert "floor" not in kinds(shorter)
    recovered = Run(steps=numbered(clean(100, 65536.0) + skips(20, 65536.0) + clean(9, 0.0625)))
    assert "floor" not in kinds(recovered)


def test_the_floor_itself():
    at_floor = skips(1, 1.0, cause=Cause.FLOOR)[0]._replace(next_scale=1.0)
    once = Run(steps=numbered([*clean(500, 1.0), at_floor, *clean(499, 1.0)]))
    finding = only(once)
    assert (finding.kind, finding.severity, finding.steps) == ("floor", "warning", (500,))
    assert "1 step of 1000 overflowed at 2^0" in finding.evidence
    assert only(Run(steps=once.steps[:501])).severity == "broken"  # it ended there
    often = Run(steps=numbered(([*clean(7, 1.0), at_floor]) * 20 + clean(1, 1.0)))
    assert only(often).severity == "broken"
    rarely = Run(steps=numbered(([*clean(12, 1.0), at_floor]) * 20 + clean(1, 1.0)))
    assert only(rarely).severity == "warning"


def test_a_scale_that_started_too_high():
    run = Run(steps=numbered(skips(8, 2.0**24) + clean(100, 2.0**16)))
    finding = only(run)
    assert (finding.kind, finding.severity) == ("start", "warning")
    assert "8 of the first 8 steps were skipped while the scale fell from 2^24 to 2^16" in (
        finding.evidence
    )
    assert "init_scale=2^16" in finding.advice
    assert diagnose(Run(steps=numbered(skips(7, 2.0**23) + clean(100, 2.0**16)))) == []
    # A search with pauses is one search; after five clean steps it is over.
    first, second = skips(4, 2.0**24), skips(4, 2.0**20)
    paused = Run(steps=numbered(first + clean(4, 2.0**20) + second + clean(99, 2.0**16)))
    assert kinds(paused) == ["start"]
    ended = Run(steps=numbered(first + clean(5, 2.0**20) + second + clean(99, 2.0**16)))
    assert kinds(ended) == []


def led(leads, others, clean_steps, name="gate.weight"):
    """Overflows now and then, at a scale that only ever falls."""
    steps, scale = clean(20, 2.0**30), 2.0**30
    for i in range(leads + others):
        who = name if i < leads else f"other{i}.weight"
        steps += skips(1, scale, (who, "z.weight") if i == 0 else (who,))
        scale /= 2
        steps += [s._replace(amax=65504 / 2**10) for s in clean(clean_steps, scale)]
    return Run(steps=numbered(steps))


def test_one_parameter_that_leads():
    run = led(5, 1, 30)
    events = [
        Event(s.step, "skip", {"culprits": [f"{s.culprits[0]} (nan)"]})
        for s in run.steps
        if s.culprits
    ]
    finding = only(Run(steps=run.steps, events=events))
    assert (finding.kind, finding.severity) == ("culprit", "warning")
    assert finding.parameters == ("gate.weight",)
    assert finding.steps == (20, 51, 82, 113, 144)
    assert "led 5 of 6 overflows in 206 steps (5 nan), 4 times alone" in finding.evidence
    assert "10 bits below float16's maximum" in finding.evidence
    assert diagnose(led(4, 0, 30)) == []  # too few to tell
    assert diagnose(led(7, 3, 30)) == []  # others lead as well
    assert kinds(led(8, 2, 30)) == ["culprit"]  # 80 %
    assert kinds(led(10, 0, 900)) == ["culprit"]
    assert diagnose(led(10, 0, 1100)) == []  # less than one step in 1,000
    assert diagnose(led(9, 0, 30, name="")) == []  # nobody knows who it was


def test_many_overflows_in_different_parameters():
    finding = only(led(3, 3, 15))
    assert (finding.kind, finding.severity) == ("overflows", "warning")
    assert "6 of 116 steps overflowed (5%), first in 4 parameters" in finding.evidence
    assert finding.parameters == ("gate.weight", "other3.weight", "other4.weight", "other5.weight")
    assert "retries=4" in finding.advice
    assert diagnose(led(2, 2, 9)) == []
    assert diagnose(led(3, 3, 16)) == []  # less than one step in twenty


def test_a_static_scale_that_is_too_high_is_no_search():
    """It never falls, so it does not find anything: not a start, but overflows."""
    bad = Step(0, 1024.0, 1024.0, **BAD)
    assert kinds(Run(steps=numbered([bad, *clean(2)] * 50))) == ["overflows"]
    with_hysteresis = [s for s in skips(8, 2.0**24) for s in [s] * 4]
    assert kinds(Run(steps=numbered(with_hysteresis + clean(900, 2.0**16)))) == ["start"]
    stuck = [s for s in skips(8, 2.0**24) for s in [s] * 5]
    assert kinds(Run(steps=numbered(stuck + clean(900, 2.0**16)))) == ["culprit"]


def test_exploding_gradients():
    def run(growth, before=40):
        norms = [1.0] * before + [growth] * 5
        steps = [s._replace(norm=n) for s, n in zip(clean(len(norms)), norms)]
        return Run(steps=numbered(steps + skips(1, 1024.0) + clean(5, 512.0)))

    finding = only(run(10.0))
    assert (finding.kind, finding.severity, finding.steps) == ("exploding", "warning", (45,))
    assert "grown 10 times within 30 steps, from 1 to 10" in finding.evidence
    assert diagnose(run(9.9)) == []
    assert diagnose(run(100.0, before=24)) == []  # too early to know what is usual
    spoilt = run(10.0).steps
    spoilt[45] = spoilt[45]._replace(cause=Cause.LOSS_NONFINITE)
    assert kinds(Run(steps=spoilt)) == ["forward-nan"]


def test_what_explains_another_finding_stands_for_it():
    """A scale that decays names its culprit: no second finding says the same."""
    run = Run(steps=numbered(skips(30, 2.0**16)))
    assert kinds(run) == ["floor"]
    assert only(run).parameters == ("a.weight",)


# losses


def test_the_scale_is_never_the_cause_of_a_non_finite_loss():
    bad_loss = Step(
        0, 1024.0, 1024.0, nonfinite=True, verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE
    )
    once = Run(steps=numbered([*clean(50), bad_loss, *clean(49)]))
    finding = only(once)
    assert (finding.kind, finding.severity, finding.steps) == ("forward-nan", "warning", (50,))
    assert "1 step of 100, first at step 50 (loss nan); 1 of them were skipped" in finding.evidence
    assert "gradlift run" in finding.advice
    to_the_end = Run(steps=numbered(clean(97) + [bad_loss] * 3))
    assert only(to_the_end).severity == "broken"
    assert only(Run(steps=numbered(clean(98) + [bad_loss] * 2))).severity == "warning"
    assert only(Run(steps=numbered([bad_loss] * 60 + clean(50)))).severity == "broken"  # most of it
    assert kinds(Run(steps=numbered([bad_loss] * 60))) == ["forward-nan"]  # no floor, no start
    infinite = Run(steps=numbered([*clean(9), bad_loss._replace(loss=math.inf), *clean(9)]))
    assert "(loss inf)" in only(infinite).evidence


def test_what_was_done_to_find_where_a_loss_became_nan():
    """And no run that was recorded by `gradlift run` is told to be recorded by it."""
    bad_loss = Step(4, 8.0, 8.0, verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE)
    calls = [Calls(0, (Call("backward", "train.py:9", "", ""),), 5)]
    steps = [*clean(4), bad_loss]
    assert "gradlift run" in only(Run(steps=steps)).advice
    assert "the backward() of train.py:9." in only(Run(steps=steps, calls=calls)).advice
    note = Event(None, "note", {"code": "untraced", "text": "not run again: other ranks"})
    assert (
        "not run again: other ranks." in only(Run(steps=steps, calls=calls, events=[note])).advice
    )


def test_the_first_bad_operation_explains_the_loss():
    bad_loss = Step(4, 8.0, 8.0, verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE)
    detail = {"module": "blocks.3", "found": "nan", "where": "forward", "op": "acos"}
    detail |= {"place": "net.py:7", "input": "1.5 in the input", "dtype": "float32"}
    finding = only(Run(steps=[*clean(4), bad_loss], events=[Event(4, "origin", detail)]))
    assert (finding.kind, finding.severity, finding.place) == (
        "bad-operation",
        "broken",
        "net.py:7",
    )
    assert finding.evidence == (
        "At step 4 acos (float32) was the first operation of the forward pass to give nan in "
        "blocks.3, called from net.py:7, 1.5 in the input."
    )


def test_a_loss_in_float16():
    note = Event(0, "note", {"code": "half-loss", "text": "in any words"})
    finding = only(Run(steps=clean(9, 32768.0), events=[note]))
    assert (finding.kind, finding.severity, finding.steps) == ("half-loss", "warning", (0,))
    text = "loss computed in float16: its scale is capped at 2^15"
    assert diagnose(Run(steps=clean(9), events=[Event(0, "note", {"text": text})])) == []


# settings


def test_a_schedule_that_moves_on_skipped_steps():
    def run(skipped, total, moves=True):
        steps = numbered(skips(skipped, 65536.0) + clean(total - skipped, 65536.0 / 2**skipped))
        rate = (lambda i: 0.01 * i) if moves else (lambda i: 0.01 * max(0, i - skipped))
        return Run(steps=[s._replace(lr=rate(s.step)) for s in steps])

    finding = only(run(3, 100))
    assert (finding.kind, finding.severity, finding.steps) == ("lr-moved", "warning", (0, 1, 2))
    assert "On 3 of 3 skipped steps" in finding.evidence
    assert "from 0 to 0.01: 3% of the schedule" in finding.evidence
    assert diagnose(run(2, 100)) == []
    assert kinds(run(3, 300)) == ["lr-moved"]
    assert diagnose(run(3, 301)) == []  # less than 1 % of the schedule
    assert diagnose(run(3, 100, moves=False)) == []
    unknown = [s._replace(lr=math.nan) for s in run(3, 100).steps]
    assert diagnose(Run(steps=unknown)) == []


def test_a_scale_that_is_no_power_of_two():
    finding = only(Run(steps=numbered(clean(3, 512.0) + clean(7, 1000.0))))
    assert (finding.kind, finding.severity) == ("odd-scale", "hint")
    assert "1000 at step 3, and no power of two in 7 of 10 steps" in finding.evidence
    assert "init_scale=2^10" in finding.advice
    assert diagnose(Run(steps=clean(9, 2.0**-20))) == []


# underflow


def test_a_dead_layer():
    zero = gradient({}, zeros=40)
    run = sampled(clean(11), **{"a.weight": GOOD, "b.weight": zero, "b.bias": zero})
    finding = only(run)
    assert (finding.kind, finding.severity) == ("dead-layer", "warning")
    assert finding.parameters == ("b.weight", "b.bias")
    assert finding.title == "1 layer without any gradient: b"
    assert "In 3 samples all 80 elements were zero, in 1 of 2 layers" in finding.evidence
    assert "are in range" in finding.evidence
    two_samples = sampled(clean(10), **{"a.weight": GOOD, "b.weight": zero})
    assert diagnose(two_samples) == []
    with_a_living_bias = sampled(clean(11), **{"b.weight": zero, "b.bias": GOOD})
    assert diagnose(with_a_living_bias) == []
    assert only(sampled(clean(11), **{"b.weight": zero})).severity == "broken"  # nothing moves
    many = sampled(clean(1000), 1, **{"a.weight": GOOD, "b.weight": zero})
    assert "In 200 samples" in only(many).evidence


def test_a_layer_that_was_flushed_needs_a_larger_scale():
    tiny = gradient({-20: 50, -10: 50})
    run = sampled(clean(11), **{"a.weight": tiny, "b.weight": gradient({}, zeros=40)})
    finding = only(run)
    assert finding.kind == "dead-layer"
    assert "probably flushed to zero" in finding.evidence
    assert finding.advice == 'Raise the scale: rule="auto".'


def test_a_layer_that_underflows():
    lost = gradient({-20: 90, -10: 10}, zeros=100)
    run = sampled(clean(11), **{"a.weight": GOOD, "b.weight": lost})
    finding = only(run)
    assert (finding.kind, finding.severity) == ("underflow", "warning")
    assert finding.parameters == ("b.weight",)
    assert "50% are zero, and 90% of the rest are subnormal, in 3 samples" in finding.evidence
    assert "6 bits below 65504: no scale fits all" in finding.evidence
    assert (
        diagnose(sampled(clean(11), **{"a.weight": GOOD, "b.weight": gradient({-20: 89, -10: 11})}))
        == []
    )
    # Below 2^-24 float16 has nothing: this gradient was never in float16, and lost nothing.
    nearly = gradient({-40: 1, -20: 95, -10: 4})
    assert kinds(sampled(clean(11), **{"a.weight": GOOD, "b.weight": nearly})) == ["underflow"]
    beyond = gradient({-40: 2, -20: 95, -10: 3})
    assert diagnose(sampled(clean(11), **{"a.weight": GOOD, "b.weight": beyond})) == []
    # The bias in front of a norm has no gradient but rounding noise.
    noise = gradient({-20: 8})
    assert diagnose(sampled(clean(11), **{"b.weight": GOOD, "b.bias": noise})) == []


def test_samples_of_skipped_steps_do_not_count():
    lost = gradient({-20: 90, -10: 10})
    run = sampled(clean(11), **{"b.weight": lost})
    run.steps[0] = run.steps[0]._replace(verdict=Verdict.SKIP, cause=Cause.OVERFLOW)
    assert diagnose(run) == []


def test_a_script_that_was_only_watched_loses_nothing_in_float16():
    lost = gradient({-20: 95, -10: 5})
    steps = [s._replace(scale=1.0, next_scale=1.0, amax=2.0**-9) for s in clean(20)]
    run = sampled(steps, **{"b.weight": lost})
    assert kinds(run) == ["conservative"]
    run.header["rule"] = "off"
    assert diagnose(run) == []


def test_a_scale_that_leaves_bits_unused():
    def run(amax, share, outliers=0):
        steps = [s._replace(amax=amax if s.step >= outliers else 60000.0) for s in clean(200)]
        return sampled(steps, **{"a.weight": gradient({-20: share, -3: 100 - share})})

    finding = only(run(65504 / 2**8, 10))
    assert (finding.kind, finding.severity) == ("conservative", "hint")
    assert "at least 8 bits below 65504, while 10% of the elements" in finding.evidence
    assert "init_scale=2^15" in finding.advice  # 5 of the 8 bits, from 2^10
    assert diagnose(run(65504 / 2**7.9, 10)) == []
    assert diagnose(run(65504 / 2**8, 9)) == []
    assert kinds(run(65504 / 2**8, 10, outliers=2)) == ["conservative"]
    assert diagnose(run(65504 / 2**8, 10, outliers=4)) == []


# ranks


def record(path, steps):
    with Journal(path) as journal:
        for s in steps:
            journal.step(s)


def test_ranks_out_of_step(tmp_path):
    here = clean(20)
    there = [*clean(12), Step(12, 1024.0, 512.0, **BAD), *clean(7, 512.0, start=13)]
    record(tmp_path / "journal.jsonl", here)
    record(tmp_path / "rank-1.jsonl", here[:15])  # it ended earlier, that is all
    record(tmp_path / "rank-3.jsonl", here)
    assert diagnose(tmp_path) == []
    record(tmp_path / "rank-2.jsonl", there)
    (tmp_path / "rank-4.jsonl").write_text("not a journal")
    finding = only(read_journal(tmp_path))
    assert (finding.kind, finding.severity, finding.steps) == ("ranks", "broken", (12,))
    assert "1 of 3 other ranks differ from rank 0 (rank 2)" in finding.evidence
    assert "step 12: rank 0 stepped at 2^10, rank 2 skipped at 2^10" in finding.evidence


# all together


def test_the_most_serious_comes_first():
    steps = numbered(
        clean(100, 1000.0)
        + [s._replace(scale=1000.0 / 2**i) for i, s in enumerate(skips(20, 1024.0))]
    )
    found = diagnose(Run(steps=steps))
    assert [(f.severity, f.kind) for f in found] == [("broken", "floor"), ("hint", "odd-scale")]
    bad_loss = Step(0, 1024.0, 1024.0, verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE)
    found = diagnose(Run(steps=numbered([*clean(100), bad_loss, *skips(20, 1024.0)])))
    assert [(f.severity, f.kind) for f in found] == [
        ("broken", "floor"),
        ("warning", "forward-nan"),  # looked for before
    ]


def test_each_key_is_judged_by_itself():
    """Two losses take turns; the second one thrashes, which the sequence of both would hide."""
    bad = thrashing(6, 10).steps
    good = clean(len(bad), 2.0**20)
    both = [s for g, b in zip(good, bad) for s in (g._replace(key="g"), b._replace(key="d"))]
    finding = only(Run(steps=both))
    assert finding.title == "The scale oscillates at the same value (loss 'd')"


def test_a_long_run_takes_linear_time():
    """A million steps take a few seconds; here the work for twice the steps is counted."""

    def work(n):
        steps = replay(
            Run(steps=[Step(i, 1.0, 1.0, amax=1.0 + i % 7) for i in range(n)]), "dynamic"
        ).steps
        run = sampled(steps, 100, **{"a.weight": GOOD})
        count = 0

        def tally(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(tally)
        try:
            assert diagnose(run) == []
        finally:
            sys.setprofile(None)
        return count

    assert work(8000) < 2.2 * work(4000)


# the command


def doctor(*arguments):
    command = [sys.executable, "-m", "gradlift", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_doctor(tmp_path):
    path = tmp_path / "journal.jsonl"
    steps = numbered(clean(30, 65536.0) + skips(20, 65536.0))
    with Journal(path) as journal:
        for s in steps:
            if s.nonfinite:
                journal.event(
                    "skip",
                    s.step,
                    cause="OVERFLOW",
                    scale=s.scale,
                    next_scale=s.next_scale,
                    culprits=["a.weight (inf)", "b.weight (nan)"],
                )
            journal.step(s)
    done = doctor(tmp_path)
    assert done.returncode == 1
    head = "Training is broken: the scale decays without end.\n50 steps, 20 skipped\n\n"
    assert done.stdout.startswith(f"{head}broken  The scale decays without end\n")
    assert "skipped steps 30-49: overflow, 20 steps\n" in done.stdout
    assert "  skip   " not in done.stdout
    every = doctor(tmp_path, "--events").stdout
    assert "step      30  skip   overflow at 2^16 -> 2^15: a.weight (inf) and 1 more\n" in every
    assert every.count("  skip   ") == 20
    told = json.loads(doctor(path, "--json").stdout)
    assert told["broken"] is True
    assert [f["kind"] for f in told["findings"]] == ["floor"]
    assert told["events"][0]["culprits"] == ["a.weight (inf)", "b.weight (nan)"]


def test_doctor_on_a_healthy_run_an_empty_one_and_none(tmp_path):
    record(tmp_path / "good.jsonl", clean(30))
    done = doctor(tmp_path / "good.jsonl")
    assert done.returncode == 0
    assert "Nothing wrong was found in what was recorded of 30 steps." in done.stdout
    assert "Not looked at: each parameter's gradient; the forward pass" in done.stdout
    (tmp_path / "empty.jsonl").touch()
    assert doctor(tmp_path / "empty.jsonl").returncode == 0
    done = doctor(tmp_path / "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


# Weights


def test_weights_that_are_not_finite_explain_the_rest():
    bad_loss = Step(
        0, 8.0, 8.0, nonfinite=True, verdict=Verdict.SKIP, cause=Cause.LOSS_NONFINITE, loss=math.nan
    )
    run = Run(
        steps=numbered([bad_loss] * 60),
        events=[Event(0, "note", {"code": "weights-nonfinite", "text": "the weight b holds nan"})],
    )
    finding = only(run)
    assert (finding.kind, finding.severity, finding.steps) == ("weights-nonfinite", "broken", (0,))
    assert "the weight b holds nan" in finding.evidence


def test_weights_at_the_end_of_their_range():
    held = Step(0, 8.0, 8.0, amax=1000.0, norm=1.0, cause=Cause.WEIGHT_RANGE, culprits=("b", "a"))
    finding = only(Run(steps=numbered([*clean(50, 8.0), held, held, *clean(50, 8.0)])))
    assert (finding.kind, finding.severity) == ("weight-range", "warning")
    assert (finding.steps, finding.parameters) == ((50, 51), ("b",))
    assert "In 2 steps of 102" in finding.evidence


# ranks


def of_two_ranks(folder, here, there):
    for name, (weights, gradients) in (("journal", here), ("rank-1", there)):
        with Journal(folder / f"{name}.jsonl") as journal:
            journal.describe(rule="dynamic")
            journal.step(Step(0, 8.0, 8.0))
            journal.event("ranks", 0, weights=weights, gradients=gradients)
    return read_journal(folder / "journal.jsonl")


@pytest.mark.parametrize(
    ("there", "apart"),
    [
        ((5.0, 2.0), False),
        ((6.0, 2.0), True),
        ((6.0, 3.0), False),  # tensor parallel: each rank has gradients and weights of its own
        ((math.nan, 2.0), False),
        (("six", 2.0), False),
    ],
)
def test_equal_gradients_on_different_weights(there, apart, tmp_path):
    assert kinds(of_two_ranks(tmp_path, (5.0, 2.0), there)) == ["ranks"] * apart


# gradients that were changed by hand


def changed(*facts, **header):
    calls = [
        Calls(
            i,
            tuple(
                Call(name, "train.py:3", "Adam" * (name != "backward"), fact)
                for name, fact in (
                    ("backward", "scaled"),
                    ("gradients changed", each),
                    ("scaler.step", ""),
                    ("update", ""),
                )
            ),
            1,
        )
        for i, each in enumerate(facts)
    ]
    return Run(header=header, steps=clean(9), calls=calls)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (("times 0.5", "times 0.5"), None),  # a mean
        (("times 0.5", "times 0.1"), "clip-scaled"),
        (("times 0.5", "times 2"), None),
        (("times 0.5",), None),
        (("added", "added"), None),  # one order of calls, seen twice: see below
        (("added", "added", "times 0.5"), None),
        (("times nonsense", "times 0.1"), None),
    ],
)
def test_gradients_that_carry_the_scale_are_changed(facts, kind):
    found = kinds(changed(*facts))
    assert found == ([kind] if kind else [])


def test_something_is_added_to_gradients_that_carry_the_scale():
    run = changed("added")
    run.calls[0] = run.calls[0]._replace(times=2)
    assert kinds(run) == ["unscale-missing"]
    run.header["world_size"] = 2  # ranks may average them by hand
    assert kinds(run) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("No inf checks were recorded for this optimizer.", "detached-layer"),
        ("No inf checks were recorded prior to update.", "update-twice"),
    ],
)
def test_an_error_of_torch_has_a_kind_of_its_own(message, kind):
    """The first is raised by step(), of an optimizer without a gradient; the second by update()."""
    detail = {"how": "exception", "type": "AssertionError", "message": message}
    assert only(Run(steps=clean(4), events=[Event(None, "end", detail)])).kind == kind

"""The report: golden text and JSON, a page of any run, long runs made short.

`python tests/core/test_report.py` writes the golden files anew; read the difference.
"""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gradlift import Cause, Journal, Verdict, report
from gradlift.analysis.diagnosis import Finding, diagnose
from gradlift.analysis.exponents import parameters
from gradlift.analysis.totals import totals
from gradlift.cli.compare import compare
from gradlift.cli.replay import replay
from gradlift.cli.report import report as report_command
from gradlift.errors import GradliftError, JournalError, JournalWarning
from gradlift.formats import BF16, E4M3, E5M2, FP16
from gradlift.journal import Call, Calls, Event, Probe, Run, Sample, Step, read_journal
from gradlift.report import charts as _charts
from gradlift.report import differences
from gradlift.report import json_report as _json
from gradlift.report import page as _html
from gradlift.report import text_report as _text
from gradlift.report import thinning as _thinning
from gradlift.report.modules import modules
from gradlift.report.page import packing
from gradlift.report.page.comparison import comparison
from gradlift.report.private import without_source
from gradlift.report.sampled import update_data, updates
from gradlift.report.seen_in import known_kinds

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "</script><img src=x onerror=alert(1)>"
SKIP = {"verdict": Verdict.SKIP, "cause": Cause.OVERFLOW, "nonfinite": True}


def story():
    """Forty steps: an overflow, a retry, a NaN loss, a note; two samples."""
    steps, scale = [], 2.0**16
    for i in range(40):
        step = Step(i, scale, scale, 2.0**10, False, 4 - i / 16, 0.5, 1e-3, seconds=0.25)
        if i == 3:
            step = step._replace(**SKIP, next_scale=scale / 2, culprits=("head", "body"))
        elif i == 20:
            nan = {"cause": Cause.LOSS_NONFINITE, "loss": math.nan}
            step = step._replace(**SKIP | nan, culprits=("head",))
        elif i == 30:
            step = step._replace(retries=1, scale=scale / 2, next_scale=scale / 2)
        elif i == 35:
            step = step._replace(amax=65504 / 2)
        steps.append(step)
        scale = step.next_scale
    body = {"elements": 8, "zero": 0.25, "subnormal": 0.25, "near_max": 0.0}
    head = {"elements": 4, "zero": 0.0, "subnormal": 0.0, "near_max": 0.25}
    sampled = {
        "body": {**body, "exponents": {"-30": 2, "-20": 2, "-3": 2}},
        "head": {**head, "exponents": {"0": 3, "14": 1}},
    }
    retry = {"cause": "OVERFLOW", "scale": 2.0**15, "next_scale": 2.0**14}
    return Run(
        header={
            "kind": "header",
            "schema": 1,
            "time": "2026-01-02T03:04:05+0000",
            "versions": {"python": "3.11.7", "gradlift": "0.1.0", "torch": "2.13.0"},
            "rule": "backoff",
            "framework": "torch",
            "formats": ["fp16"],
            "parameters": {"body": 8, "head": 4, "unused": 2},
            "command": ["train.py", "--lr", "3e-4"],
            "world_size": 1,
        },
        steps=steps,
        samples=[Sample(0, sampled), Sample(20, sampled)],
        events=[
            Event(3, "skip", {"cause": "OVERFLOW", "scale": 2.0**16, "culprits": ["head (inf)"]}),
            Event(12, "note", {"text": "evaluation"}),
            Event(
                20,
                "origin",
                {"module": "body.norm", "found": "nan", "where": "forward", "op": "div"},
            ),
            Event(30, "retry", {**retry, "culprits": ["body (inf)"]}),
            Event(31, "resume", {"time": "2026-01-03T00:00:00+0000"}),
        ],
        probes=[
            Probe(0, {"body": {**body, "amax": 65504 / 4}, "body.<norm>": {**head, "amax": 0.0}}),
            Probe(20, {"body": {**body, "zero": 0.75, "amax": 65504 / 2, "lift": 8.0}}),
        ],
        path=Path("gradlift-runs/story/journal.jsonl"),
    )


FINDINGS = [
    Finding(
        "broken",
        "The forward pass gives NaN",
        "The loss was NaN at step 20, before it was scaled.",
        (20,),
        ("head",),
        "Look for a division or a log in the loss.",
        "forward",
    ),
    Finding("hint", "FP16 holds half of body", "2 of 8 elements are subnormal.", (), ("body",)),
]


def written():
    """What the golden files hold."""
    return {
        "report.txt": _text.report(story(), FINDINGS),
        "report.json": json.dumps(_json.report(story(), FINDINGS), indent=2) + "\n",
    }


@pytest.mark.parametrize("name", ["report.txt", "report.json"])
def test_golden(name):
    assert written()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_totals_of_the_story():
    added = totals(story())
    assert (added.steps, added.applied, added.skipped, added.retries) == (40, 38, 2, 1)
    assert added.causes == {"overflow": 1, "loss non-finite": 1}
    assert (added.first_scale, added.last_scale) == (2.0**16, 2.0**14)
    assert (added.worst_headroom, added.worst_headroom_step) == (1.0, 35)
    assert added.flushed == 8 / 24  # of body's 8: two zeros and two at 2^-30, in each sample
    assert (added.first_loss, added.last_loss) == (4.0, 4 - 39 / 16)
    assert (added.step_seconds, added.all_seconds) == (0.25, 10.0)


def test_parameters_worst_first_and_true_exponents():
    body, head, unused = parameters(story())
    assert (body.name, head.name, unused.name) == ("body", "head", "unused")
    assert body.shares == (0.5, 0.25, 0.0)
    assert body.scaled == {-30: 4, -20: 4, -3: 4}
    # The scale was 2^16 at step 0 and 2^15 at step 20.
    assert body.true == {-46: 2, -45: 2, -36: 2, -35: 2, -19: 2, -18: 2}
    assert (head.culprit, head.leads, body.culprit, body.leads) == (2, 2, 2, 1)
    assert unused.elements == 0


@pytest.mark.parametrize("format", [FP16, BF16, E5M2, E4M3], ids=str)
def test_shares_are_what_rounding_does(format):
    """Three quarters into a binade, where no tie is near, a format's own rounding decides."""
    for exponent in range(-140, 128):
        value = 1.75 * 2.0**exponent
        shares = format.shares({exponent: 1})
        assert shares.flushed == format.flushes(value)
        subnormal = not format.flushes(value) and value < format.smallest_normal
        assert shares.subnormal == subnormal
        if exponent != format.max_exponent:  # E4M3's topmost binade is cut off
            assert shares.overflowed == format.overflows(value)


def test_summary_is_short():
    lines = report.summary(story()).splitlines()
    assert len(lines) <= 20
    assert lines[-7].split() == ["steps", "40", "38", "applied"]
    assert "2^16 -> 2^14" in lines[-5]


def no_number():
    """Not a single finite number but the scale."""
    bad = [Step(i, 8.0, 8.0, **SKIP, loss=math.inf, norm=math.nan) for i in range(5)]
    return Run(steps=bad, samples=[Sample(0, {"w": {"elements": 4, "zero": 0.0, "exponents": {}}})])


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(), "Nothing was recorded"),
        (Run(samples=[Sample(0, {})]), "Nothing was recorded"),
        (Run(events=[Event(None, "note", {"a": 1})]), "Nothing was recorded"),
        (Run(steps=[Step(0, 8.0, 8.0)]), "No gradients were sampled"),
        (no_number(), "It was not recorded"),
        (Run(header={"parameters": None, "versions": None}), "Nothing was recorded"),
    ],
    ids=["empty", "empty sample", "only an event", "no samples", "no number", "odd header"],
)
def test_any_run_has_every_report(run, words):
    assert words in report.html(run)
    assert report.text(run)
    assert report.summary(run)
    json.dumps(report.as_json(run), allow_nan=False)


def test_page_of_the_story():
    page = _html.report(story(), FINDINGS)
    for words in (
        "Training is broken: the forward pass gives NaN. And 1 more finding.",
        'class="finding broken"',
        "Look for a division or a log in the loss.",
        "first nan (forward): div, body.norm",
        "a later process continued the run",
        "train.py --lr 3e-4",
        "2.13.0",
    ):
        assert words in page
    assert 'id="thinned"' not in page


def data_of(page):
    inside = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.S)
    return json.loads(packing.unpacked(inside[1]))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen = []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))


def hostile_run():
    shares = {"elements": 4, "zero": 0.5, "exponents": {"-3": 2}}
    steps = [Step(0, 8.0, 4.0, **SKIP, culprits=(HOSTILE,), key=HOSTILE), Step(1, 4.0, 4.0)]
    return Run(
        header={"rule": HOSTILE, "parameters": {HOSTILE: 4}, "versions": {HOSTILE: HOSTILE}},
        steps=steps,
        samples=[Sample(0, {HOSTILE: shares})],
        events=[Event(0, "note", {"text": HOSTILE}), Event(1, HOSTILE, {HOSTILE: HOSTILE})],
        path=Path("'\"<b>.jsonl"),
    )


def test_no_name_becomes_markup():
    finding = Finding("hint", HOSTILE, HOSTILE, (0,), (HOSTILE,), HOSTILE)
    page = _html.report(hostile_run(), [finding])
    tags = Tags()
    tags.feed(page)
    assert [tag for tag, _ in tags.seen].count("script") == 3
    assert not [tag for tag, _ in tags.seen if tag in ("img", "b", "iframe", "link", "object")]
    assert not [a for _, attributes in tags.seen for a in attributes if a.startswith("on")]
    data = data_of(page)
    assert data["heat"]["names"] == [HOSTILE]
    assert data["marks"]["culprit"] == [HOSTILE]
    report.text(hostile_run())


def test_page_asks_for_nothing():
    tags = Tags()
    tags.feed(report.html(story()))
    assert not [a for _, attributes in tags.seen for a in attributes if a == "src"]
    links = [attributes["href"] for _, attributes in tags.seen if "href" in attributes]
    assert links
    assert all(link.startswith("#") for link in links)
    policy = next(a["content"] for t, a in tags.seen if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy


def test_each_loss_has_its_line():
    steps = [Step(i, 8.0, 8.0, key=key) for i in range(3) for key in ("generator", "critic")]
    data = data_of(report.html(Run(steps=steps)))
    assert [line["key"] for line in data["lines"]] == ["generator", "critic"]
    assert [line["step"] for line in data["lines"]] == [[0, 1, 2], [0, 1, 2]]


def test_a_resumed_run_is_cut_where_it_starts_again():
    steps = [Step(i, 8.0, 8.0) for i in (0, 1, 2, 1, 2, 3)]
    assert data_of(report.html(Run(steps=steps)))["lines"][0]["later"] == [3]


numbers = st.integers(-50, 50).map(float) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=150),
    st.sets(st.integers(0, 149), max_size=20),
    st.integers(1, 8),
)
def test_thinning_keeps_extremes_ends_and_what_was_asked_for(points, keep, buckets):
    n, series = len(points), list(zip(*points, strict=True))
    keep = {i for i in keep if i < n}
    chosen = _thinning.thin(series, keep, buckets)
    assert chosen == sorted(set(chosen))
    assert keep <= set(chosen)
    assert {0, n - 1} <= set(chosen)
    assert len(chosen) <= max(6 * buckets, len(keep) + 6 * buckets)
    for bucket in range(buckets):
        start, stop = bucket * n // buckets, (bucket + 1) * n // buckets
        inside = [i for i in chosen if start <= i < stop]
        for values in series:
            before = [v for v in values[start:stop] if math.isfinite(v)]
            after = [values[i] for i in inside if math.isfinite(values[i])]
            if before:
                assert (min(after), max(after)) == (min(before), max(before))


outcomes = st.sampled_from(
    [
        (Verdict.APPLY, Cause.NONE),
        (Verdict.SKIP, Cause.OVERFLOW),
        (Verdict.SKIP, Cause.FLOOR),
        (Verdict.HALT, Cause.LOSS_NONFINITE),
    ]
)


@given(st.lists(st.tuples(outcomes, st.sampled_from([1.0, 2.0])), max_size=120), st.integers(1, 20))
def test_every_bad_step_lies_in_a_mark(story, most):
    steps = [
        Step(i, scale, scale, verdict=verdict, cause=cause)
        for i, ((verdict, cause), scale) in enumerate(story)
    ]
    marks = _thinning.marks(Run(steps=steps), most)
    bad = [s for s in steps if s.verdict is not Verdict.APPLY]
    assert sum(mark.times for mark in marks) == len(bad)
    assert len(marks) <= most + 3  # one more for each kind
    for step in bad:
        mine = [m for m in marks if m.first <= step.step <= m.last and m.cause == str(step.cause)]
        assert mine


def test_marks_tell_retries_and_events_without_a_step():
    retry = {"cause": "OVERFLOW", "scale": 8.0, "next_scale": 4.0, "culprits": ["w (inf)", "v"]}
    run = Run(
        steps=[Step(0, 4.0, 4.0, retries=1), Step(1, 4.0, 2.0, **SKIP)],
        events=[
            Event(0, "retry", retry),
            Event(1, "skip", {"cause": "OVERFLOW", "scale": 4.0}),  # step 1 tells it already
            Event(2, "halt", {"cause": "FLOOR", "scale": 2.0}),
        ],
    )
    found = [(m.first, m.what, m.cause, m.culprit, m.others) for m in _thinning.marks(run)]
    assert found == [
        (0, "retry", "overflow", "w", 1),
        (1, "skip", "overflow", "", 0),
        (2, "halt", "floor", "", 0),
    ]


def long_run(steps=100_000, every=500, names=300):
    """Seven overflows among so many steps, one wild loss, samples of many parameters."""
    bad = {steps * k // 7 + 13 for k in range(7)}
    made = [
        Step(i, 2.0**15, 2.0**15, amax=1.0 + i % 97, loss=2 + i % 89 / 89, norm=1 + i % 83)
        for i in range(steps)
    ]
    for i in bad:
        made[i] = made[i]._replace(**SKIP)
    made[min(777, steps - 1)] = made[min(777, steps - 1)]._replace(loss=1e6)
    shares = {"elements": 1000, "zero": 0.01, "exponents": {str(e): 33 for e in range(-20, 10)}}
    sample = {f"layers.{k}.weight": shares for k in range(names)}
    return Run(steps=made, samples=[Sample(i, sample) for i in range(0, steps, every)]), bad


def test_a_page_of_300_steps_is_under_2_megabytes():
    run, _ = long_run(300, 50, names=100)
    looks = [{f"layers.{k}": {"dtype": "float16", "amax": 1.5 + k} for k in range(100)}] * 12
    moved = [{f"layers.{k}.weight": {"rms": 0.02, "update": 1e-5 * k} for k in range(100)}] * 12
    run.forwards.extend(Probe(25 * i, look) for i, look in enumerate(looks))
    run.weights.extend(Sample(25 * i, facts) for i, facts in enumerate(moved))
    assert len(report.html(run).encode()) < 2_000_000


def test_a_long_run_gives_a_small_page_that_says_so():
    run, bad = long_run()
    page = report.html(run)
    without = len(report.html(Run()))
    assert len(page) - without < 2_500_000
    assert "This page was thinned. Its curves show" in page
    assert "The heatmap shows 120 of 200 samples" in page
    data = data_of(page)
    assert data["marks"]["first"] == sorted(bad)
    (line,) = data["lines"]
    assert len(line["step"]) < 12_000
    assert bad <= set(line["step"])
    assert max(v for v in line["loss"] if v is not None) == 1e6


def test_the_heatmap_keeps_the_models_order():
    heat = _charts.chart_data(story(), parameters(story()), [])["heat"]
    assert heat["names"] == ["body", "head"]
    assert heat["median"] == [[-20, -20], [0, 0]]
    assert (heat["low"][0], heat["high"][0], heat["zero"][0]) == ([-30, -30], [-3, -3], [25, 25])


@pytest.fixture
def recorded(tmp_path):
    with Journal(tmp_path / "run" / "journal.jsonl") as journal:
        journal.describe(rule="static:2^10", parameters={"w": 4})
        for i in range(20):
            journal.step(Step(i, 2.0**10, 2.0**10, amax=2.0, loss=1.0, seconds=0.5))
    return tmp_path / "run"


def invoke(command, *arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)


def test_report_command(recorded, tmp_path):
    done = invoke(report_command, recorded)
    assert done.output == f"report: {recorded / 'report.html'}\n"
    assert (recorded / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert invoke(report_command, recorded, "--text").output == report.text(read_journal(recorded))
    made = json.loads(invoke(report_command, recorded, "--json").output)
    assert made["totals"]["steps"] == 20
    target = tmp_path / "made.txt"
    invoke(report_command, recorded / "journal.jsonl", "--text", "-o", target)
    assert target.read_text(encoding="utf-8") == report.text(read_journal(recorded))


def script_run():
    """A run whose journal has code, lines, a command and paths."""
    calls = (
        Call("backward", "secret_script.py:7", "", "scaled"),
        Call("clip_grad_norm_", "secret_script.py:8", "SGD", "1.0"),
        Call("scaler.step", "secret_script.py:9", "SGD"),
        Call("update", "secret_script.py:10"),
    )
    lines = {str(n): f"secret_code_{n}()" for n in range(5, 12)}
    frame = ["secret_script.py:8", "main", "secret_code_8()"]
    message = "No such file or directory: '/home/secret_user/data/x.bin'"
    return Run(
        header={"rule": "backoff", "command": ["/home/secret_user/secret_script.py"]},
        steps=[Step(i, 1024.0, 1024.0, amax=8.0, loss=1.0) for i in range(9)],
        events=[
            Event(None, "source", {"file": "secret_script.py", "lines": lines}),
            Event(4, "origin", {"where": "forward", "place": "secret_script.py:9"}),
            Event(5, "origin", {"where": "input", "op": "loss", "before": "secret_script:9"}),
            Event(
                None,
                "end",
                {"how": "exception", "type": "OSError", "message": message, "frames": [frame]},
            ),
        ],
        calls=[Calls(0, calls, 9)],
        path=Path("/home/secret_user/secret_folder/journal.jsonl"),
    )


def all_forms(run):
    page = report.html(run)
    return (
        page + json.dumps(data_of(page)),
        report.text(run),
        json.dumps(report.as_json(run)),
    )


def test_no_source_leaves_out_code_places_command_and_paths():
    for made in all_forms(script_run()):
        assert "secret_script.py:8" in made
    bare = without_source(script_run())
    for made in all_forms(bare):
        assert "secret" not in made
        assert "No such file" in made
    kinds = [f.kind for f in diagnose(script_run())]
    assert "clip-scaled" in kinds
    assert [f.kind for f in diagnose(bare)] == kinds
    with_code = report.html(script_run())
    assert "<mark> 8  secret_code_8()</mark>" in with_code


def test_report_command_without_source(tmp_path):
    path = tmp_path / "secret" / "journal.jsonl"
    with Journal(path) as journal:
        journal.describe(rule="static:2^10", command=["secret.py"])
        journal.step(Step(0, 2.0**10, 2.0**10, amax=2.0))
    for form in ("--text", "--json"):
        assert "secret.py" in invoke(report_command, path, form).output
        assert "secret" not in invoke(report_command, path, form, "--no-source").output
    invoke(report_command, path, "--no-source")
    assert "secret" not in path.with_name("report.html").read_text(encoding="utf-8")


def test_orders_that_differ_in_lines_only_are_added_without_them():
    one, other = (Call("step", "a.py:1"),), (Call("step", "a.py:2"),)
    run = Run(calls=[Calls(3, one), Calls(5, other), Calls(3, one, 7), Calls(5, other, 2)])
    assert without_source(run).calls == [Calls(3, (Call("step"),), 9)]


def test_report_command_on_bad_input(recorded, tmp_path):
    with pytest.raises(JournalError, match="No such file"):
        invoke(report_command, tmp_path / "nowhere")
    with pytest.raises(GradliftError, match="cannot write"):
        invoke(report_command, recorded, "-o", tmp_path / "no" / "folder" / "x.html")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.warns(JournalWarning, match="it has no line"):
        invoke(report_command, empty)
    assert "Nothing was recorded" in (tmp_path / "empty.html").read_text(encoding="utf-8")


def test_compare_command(recorded, tmp_path):
    other = tmp_path / "other.jsonl"
    with Journal(other) as journal:
        journal.step(Step(0, 2.0**16, 2.0**15, **SKIP))
    rows = [line.split() for line in invoke(compare, recorded, other).output.splitlines()]
    assert ["run", "other.jsonl"] in rows
    for row in (
        ["steps", "20", "1"],
        ["skipped", "0", "1"],
        ["last", "scale", "2^10", "2^15"],
        ["last", "loss", "1", "-"],
        ["step", "time", "500", "ms", "-"],
    ):
        assert row in rows
    assert "two runs or more" in invoke(compare, recorded).output


def test_replay_command(recorded):
    done = invoke(replay, recorded, "--rule", "static:2^20").output
    rows = [line.split() for line in done.splitlines()]
    assert ["skipped", "0", "0"] in rows
    assert ["first", "scale", "2^10", "2^20"] in rows
    assert "They differ from step 0 on." in done
    assert "the same at every step" in invoke(replay, recorded, "--rule", "static:2^10").output
    rows = [r.split() for r in invoke(replay, recorded, "--rule", "static:2^30").output.split("\n")]
    assert ["skipped", "0", "20"] in rows


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, content in written().items():
        (GOLDEN / name).write_text(content, encoding="utf-8")


def test_a_module_that_overflowed_has_no_headroom_and_comes_first():
    shares = {"elements": 8, "zero": 0.0, "subnormal": 0.0, "near_max": 0.0}
    for inf in (math.inf, "inf"):  # in a run, and as read from a journal
        seen = {"ok": {**shares, "amax": 1.0}, "bad": {**shares, "amax": inf}}
        first, _ = modules(Run(probes=[Probe(0, seen)]))
        assert (first.name, first.headroom) == ("bad", 0.0)


def two_runs():
    """The same for five steps; then the second has another loss, and later overflows."""
    first = [Step(i, 1024.0, 1024.0, amax=8.0, loss=3.0, norm=1.0) for i in range(20)]
    second = [s._replace(loss=3.5) if s.step >= 5 else s for s in first]
    second[9] = second[9]._replace(**SKIP, next_scale=512.0)
    second[10:] = [s._replace(scale=512.0, next_scale=512.0) for s in second[10:]]
    one, other = (
        {"rule": rule, "time": time, "command": ["train.py", "--lr", lr]}
        for rule, time, lr in (("auto", "1", "0.1"), ("static:1024", "2", "0.1"))
    )
    return Run(header=one, steps=first), Run(header=other, steps=second)


def test_two_runs_part_where_they_differ_first():
    found = differences.partings(*two_runs())
    assert [(p.what, p.step, p.first, p.second) for p in found] == [
        ("loss", 5, "3", "3.5"),
        ("outcome", 9, "apply", "skip: overflow"),
        ("scale", 10, "2^10", "2^9"),
    ]
    assert differences.differing_settings(*two_runs()) == [("rule", "auto", "static:1024")]
    assert differences.skipped_apart(*two_runs()) == ([], [9])
    first, _ = two_runs()
    assert differences.partings(first, first) == []


def test_the_page_of_two_runs():
    page = comparison(*two_runs(), ("<one>", "other"))
    for words in (
        "They part at step 5: loss 3 and 3.5.",
        "&lt;one&gt; and other",
        "static:1024",
        "different from step 10 on",
        'Only other skipped: <a href="#step=9">9</a>',
    ):
        assert words in page
    data = data_of(page)
    assert [line["key"] for line in data["lines"]] == ["<one>", "other"]
    assert data["marks"]["key"] == ["other"]
    assert "Nothing was recorded" in comparison(Run(), Run(), ("a", "b"))


def test_compare_command_writes_a_page(recorded, tmp_path):
    target = tmp_path / "two.html"
    other = tmp_path / "other.jsonl"
    with Journal(other) as journal:
        journal.step(Step(0, 2.0**16, 2.0**15, **SKIP))
    done = invoke(compare, recorded, other, "--html", target)
    assert done.output == f"report: {target}\n"
    assert "They part at step 0" in target.read_text(encoding="utf-8")
    assert (
        "--html shows two runs" in invoke(compare, recorded, other, other, "--html", target).output
    )
    with pytest.raises(GradliftError, match="cannot write"):
        invoke(compare, recorded, other, "--html", tmp_path / "no" / "x.html")


def test_each_mark_has_the_finding_that_is_about_it():
    mark = _thinning.Mark(3, 3, 1, "skip", "overflow", 8.0, 4.0, "")
    marks = [mark, mark._replace(first=9, last=9), mark._replace(first=12, cause="floor")]
    about = Finding("warning", "", "", (3,), kind="thrash")
    assert _charts.explained(marks, [about], ["thrash"]) == ["thrash", "thrash", "thrash"]
    later = about._replace(steps=(10,), kind="floor")  # explains overflows from its first step on
    assert _charts.explained(marks, [later], ["floor"]) == ["", "", "floor"]


def test_every_kind_with_a_chart_is_a_kind_of_the_doctor():
    """A kind that was renamed would lose its chart without a word."""
    written = "".join(
        path.read_text(encoding="utf-8")
        for path in (Path(report.__file__).parents[1] / "analysis" / "findings").glob("*.py")
    )
    assert [kind for kind in sorted(known_kinds()) if f'"{kind}"' not in written] == []


def test_an_infinite_update_has_a_page():
    facts = {"dtype": "float32", "rms": 1.0, "update": math.inf, "unchanged": 0.0}
    run = Run(steps=[Step(0, 8.0, 8.0)], weights=[Sample(0, {"w": facts})])
    assert "Updates" in report.html(run)
    assert update_data(run, updates(run))["ratio"] == [[None]]

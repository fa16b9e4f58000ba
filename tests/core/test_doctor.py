"""What `gradlift doctor` prints: one screen, or all; JSON as its schema says; the exit status."""

import json
import math
import os
import pty
import re
import subprocess
import sys

import jsonschema
import pytest
from click.testing import CliRunner

from gradlift import Cause, Verdict
from gradlift.analysis.findings import Finding
from gradlift.cli._group import gradlift
from gradlift.journal import Call, Calls, Event, Journal, Probe, Run, Sample, Step
from gradlift.report.doctor_json import SCHEMA, doctor_json
from gradlift.report.screen import in_full, screen, summary
from gradlift.report.story import looks

LONG = "a sentence that goes on and on with figures such as 12,345 in it " * 12
BAD = Step(0, 8.0, 4.0, math.nan, True, verdict=Verdict.SKIP, cause=Cause.OVERFLOW)


def finding(i=0, severity="warning", **more):
    facts = {
        "title": f"Finding {i} has a title",
        "evidence": f"Evidence {i}.",
        "steps": tuple(range(10)),
        "parameters": tuple(f"body.{n}.weight" for n in range(10)),
        "advice": f"Do {i}.",
        "kind": f"kind-{i}",
        "place": "train.py:31",
    }
    return Finding(severity, **{**facts, **more})


def skipped(n, every=2):
    """A run in which each second step is lost: n streaks of one step."""
    steps = [
        BAD._replace(step=i) if i % every == 0 else Step(i, 8.0, 8.0) for i in range(every * n)
    ]
    return Run(steps=steps)


def source(line, text="scaler.step(optimizer)"):
    return Event(None, "source", {"file": "train.py", "lines": {str(line): text}})


def shown(lines):
    return [line.text for line in lines]


# One screen


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("findings", [0, 1, 2, 40])
@pytest.mark.parametrize("streaks", [0, 1, 500])
@pytest.mark.parametrize("long", [False, True])
def test_it_is_one_screen_whatever_there_is(width, findings, streaks, long):
    more = {}
    if long:
        diff = "train.py:31\n" + "\n".join(f"-line {i}" + "x" * 300 for i in range(30))
        more = dict.fromkeys(("title", "evidence", "advice"), LONG) | {"diff": diff}
        more["parameters"] = tuple("layer" * 99 for _ in range(10))
    run = skipped(streaks)
    run.forwards.append(Probe(0, {"m" * 90: {"amax": 1.0}}))
    lines = shown(screen(run, [finding(i, **more) for i in range(findings)], width))
    assert len(lines) <= 23
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert lines[0].startswith(("It trains, but look", "Nothing "))
    assert text.count("-> ") == min(findings, 1)
    if findings > 1:
        assert "warning Finding 1 has" in text or long
    if streaks:
        assert "skipped step 0: overflow" in text
    if streaks > 100:
        assert re.search(r"^... and 4[89]\d more; --events shows each$", text, re.M)
    if findings > 30 and not long:
        left = int(re.search(r"^... and (\d+) more findings$", text, re.M)[1])
        titles = [line for line in lines if line.startswith("warning ")]
        assert len(titles) + left == findings


def test_what_was_not_looked_at_is_whole_beside_many_skipped_steps():
    lines = shown(screen(skipped(500), [finding()]))
    told = " ".join(lines)
    for sentence in looks(skipped(500)):
        assert sentence in told
    assert sum(line.startswith("skipped step") for line in lines) >= 1


def test_the_first_finding_is_told_in_full_and_the_others_in_a_line():
    run = Run(steps=[Step(0, 8.0, 8.0)], events=[source(31)])
    lines = shown(screen(run, [finding(0, "broken"), finding(1), finding(2, "hint")]))
    assert lines[:8] == [
        "Training is broken: finding 0 has a title. And 2 more findings.",
        "1 step, 0 skipped",
        "",
        "broken  Finding 0 has a title  train.py:31",
        "        train.py:31: scaler.step(optimizer)",
        "        Evidence 0.",
        "        -> Do 0.",
        "warning Finding 1 has a title  train.py:31",
    ]
    assert "More: gradlift explain kind-0; gradlift doctor -v" in lines
    assert "Evidence 1." not in "\n".join(lines)


def test_a_cure_that_is_known_line_by_line_is_printed():
    diff = "train.py:31\n-optimizer.step()\n+scaler.step(optimizer)"
    run = Run(steps=[Step(0, 8.0, 8.0)], events=[source(31, "optimizer.step()")])
    for lines in (screen(run, [finding(diff=diff)]), in_full(run, [finding(diff=diff)])):
        text = "\n".join(shown(lines))
        change = "\n".join(f"        {line}" for line in diff.splitlines())
        assert f"-> Do 0.\n{change}\n" in text
        assert text.count("optimizer.step()") == 1  # not as the line of the script once more
    assert diff.splitlines()[-1] in summary_of([finding(diff=diff)])


def summary_of(findings):
    from gradlift.report import screen as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "diagnose", lambda run: findings)
        return summary(Run(steps=[Step(0, 8.0, 8.0)]))


def test_the_summary_is_verdict_finding_figures():
    lines = summary_of([finding(0, "broken", evidence=LONG), finding(1)]).splitlines()
    assert lines[0] == "Training is broken: finding 0 has a title. And 1 more finding."
    assert lines[1] == "broken  Finding 0 has a title  train.py:31"
    assert lines[-7].split()[:2] == ["steps", "1"]
    assert len(lines) <= 20


def test_everything_is_shown_on_request():
    run = skipped(40)
    lines = shown(in_full(run, [finding(i, evidence=LONG) for i in range(30)]))
    text = " ".join(" ".join(lines).split())
    for i in range(30):
        assert f"Kind: kind-{i}; likely." in text
        assert f"-> Do {i}." in text
    assert text.count(" ".join(LONG.split())) == 30
    assert "See steps 0, 1, 2, 3, 4, ...; body.0.weight, body.1.weight" in text
    assert sum(line.startswith("skipped step ") for line in lines) == 40


def test_skipped_steps_in_a_row_share_a_line():
    lost = [BAD._replace(step=i, cause=Cause.LOSS_NONFINITE) for i in range(124, 300)]
    other = [BAD._replace(step=i, key="g") for i in range(3)]
    run = Run(steps=[Step(123, 8.0, 8.0), *lost, *other])
    text = "\n".join(shown(screen(run, [])))
    assert "\nskipped steps 124-299: loss non-finite, 176 steps\n" in text
    assert "\nskipped steps 0-2: overflow, 3 steps [g]\n" in text


def test_nothing_steers_the_terminal():
    hostile = finding(title="\x1b[2J\u202eevil", evidence="\x1b]0;x\x07", diff="\x1b[31m-a")
    for lines in (screen(Run(), [hostile]), in_full(Run(), [hostile])):
        assert all(text.isprintable() for text in shown(lines))


# The command


def doctor(*words):
    return CliRunner().invoke(gradlift, ["doctor", *map(str, words)])


def recorded(path, steps, events=()):
    with Journal(path) as journal:
        for step in steps:
            journal.step(step)
        for event in events:
            journal.event(event.what, event.step, **event.detail)
    return path


GOOD = [Step(i, 8.0, 8.0, amax=100.0) for i in range(30)]
WARNED = [
    *(BAD._replace(step=i, scale=2.0 ** (40 - i), next_scale=2.0 ** (39 - i)) for i in range(12)),
    *(Step(i, 2.0**28, 2.0**28, amax=100.0) for i in range(12, 90)),
]
BROKEN = [*GOOD, *(BAD._replace(step=i, scale=2.0 ** (30 - i)) for i in range(30, 60))]


@pytest.mark.parametrize(
    ("steps", "words", "status"),
    [
        (GOOD, [], 0),
        (GOOD, ["--fail-on", "hint"], 0),
        (WARNED, [], 0),
        (WARNED, ["--fail-on", "warning"], 1),
        (WARNED, ["-v", "--json", "--fail-on", "hint"], 1),
        (BROKEN, [], 1),
        (BROKEN, ["--json"], 1),
        (BROKEN, ["--fail-on", "hint"], 1),
    ],
)
def test_the_exit_status(steps, words, status, tmp_path):
    done = doctor(recorded(tmp_path / "run.jsonl", steps), *words)
    assert done.exit_code == status, done.output
    assert done.stdout


def test_what_cannot_be_read_is_status_2(tmp_path):
    (tmp_path / "other.txt").write_text("{}\n")
    for path in (tmp_path / "nowhere", tmp_path / "other.txt"):
        for words in ([], ["--json"], ["--fail-on", "warning"]):
            done = doctor(path, *words)
            assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert doctor("--fail-on", "nothing", tmp_path).exit_code == 2
    assert doctor().exit_code == 2


def test_colour_only_on_a_terminal(tmp_path):
    words = [sys.executable, "-m", "gradlift", "doctor", recorded(tmp_path / "run.jsonl", BROKEN)]
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    ours, theirs = pty.openpty()
    for more in ({"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}):
        subprocess.run(words, stdout=theirs, env={**env, **more}, timeout=60)
        printed = os.read(ours, 2**16).decode()
        assert ("\x1b[1;31mbroken\x1b[0m" in printed) == ("NO_COLOR" not in more)
        assert printed.count("\n") <= 23
    os.close(ours)
    os.close(theirs)
    piped = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
    assert "broken  The scale decays without end" in piped.stdout
    assert "\x1b" not in piped.stdout


def test_events_follow_the_screen(tmp_path):
    steps = skipped(60).steps
    events = [
        Event(s.step, "skip", {"cause": "OVERFLOW", "scale": 8.0}) for s in steps if s.skipped
    ]
    path = recorded(tmp_path / "run.jsonl", steps, events)
    assert len(doctor(path).stdout.splitlines()) <= 23
    lines = doctor(path, "--events").stdout.splitlines()
    assert sum(bool(re.match(r"step +\d+  skip   overflow at 2\^3$", x)) for x in lines) == 60


# JSON


def check(made):
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(made, schema, jsonschema.Draft202012Validator)


def everything():
    """A run with something of each kind of line."""
    return Run(
        header={"rule": "dynamic"},
        steps=[*WARNED, *(BAD._replace(step=i, key="g", retries=2) for i in range(30))],
        samples=[Sample(0, {"w": {"elements": 4, "zero": 1.0, "exponents": {}}})],
        forwards=[Probe(0, {"m": {"amax": 1.0, "dtype": "float16"}})],
        weights=[Sample(0, {"w": {"dtype": "float32", "rms": 1.0, "update": 0.1}})],
        calls=[Calls(0, (Call("backward", "train.py:3"), Call("update", "train.py:5")))],
        events=[
            Event(0, "skip", {"cause": "OVERFLOW", "scale": 8.0, "culprits": ["w (inf)"]}),
            Event(1, "retry", {"cause": "OVERFLOW", "micro_batch": 3, "key": "g"}),
            Event(None, "halt", {"cause": "LIMIT", "scale": math.inf, "next_scale": math.nan}),
            Event(2, "skip", {"cause": ["x"], "scale": True, "culprits": 7, "micro_batch": -1}),
            Event(2, "skip", {"cause": None, "scale": {}, "culprits": [{}], "key": [1]}),
            Event(9, "end", {"how": "finished"}),
        ],
    )


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (Run(), []),
        (Run(steps=GOOD), []),
        (everything(), [finding(i, s) for i, s in enumerate(("broken", "warning", "hint"))]),
        (everything(), [finding(diff="train.py:31\n-a\n+b", steps=(), parameters=(), place="")]),
    ],
    ids=["empty", "healthy", "three", "diff"],
)
def test_json_is_what_its_schema_says(run, found):
    made = json.loads(json.dumps(doctor_json(run, found), allow_nan=False))
    check(made)
    assert [f["kind"] for f in made["findings"]] == [f.kind for f in found]
    assert made["skipped"] == sum(x["times"] for x in made["skipped_steps"])


@pytest.mark.parametrize(
    "steps", [[], GOOD, WARNED, BROKEN], ids=["no", "good", "warned", "broken"]
)
def test_the_commands_json_is_what_its_schema_says(steps, tmp_path):
    made = json.loads(doctor(recorded(tmp_path / "run.jsonl", steps), "--json").stdout)
    check(made)
    assert (made["steps"], made["broken"]) == (len(steps), steps is BROKEN)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: made.pop("verdict"),
        lambda made: made.update(more=1),
        lambda made: made["findings"][0].pop("diff"),
        lambda made: made["findings"][0].update(severity="bad"),
        lambda made: made["events"][0].update(scale="8"),
        lambda made: made["skipped_steps"][0].update(times=0),
    ],
)
def test_the_schema_can_fail(spoil):
    made = json.loads(json.dumps(doctor_json(everything(), [finding()])))
    check(made)
    spoil(made)
    with pytest.raises(jsonschema.ValidationError):
        check(made)


def test_the_schema_is_printed():
    done = doctor("--schema")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads(SCHEMA.read_text())
    assert set(json.loads(done.stdout)["$defs"]["finding"]["properties"]) == set(Finding._fields)

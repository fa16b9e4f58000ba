"""gradlift watch: what is appended is folded into a picture, and drawn."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from click.testing import CliRunner
from rich.console import Console

from gradlift import Cause, Journal, Verdict
from gradlift.cli._view import FindingsSoFar, Tail, Trail, View
from gradlift.cli.watch import drawn, watch
from gradlift.errors import JournalError
from gradlift.journal import Run, Step

# A suite that was started in the background ignores Ctrl-C, and its children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

SAMPLE = {
    "body": {"elements": 8, "zero": 0.25, "subnormal": 0.5, "exponents": {-30: 2, -20: 4}},
    "[b]head": {"elements": 4, "zero": 0.75, "exponents": {-3: 1}},
    "neck": {"elements": 4, "zero": 0.0, "exponents": {-25: 1, 0: 3}},
}


def skip(step, scale, *, cause=Cause.OVERFLOW, culprit="body", **more):
    return Step(
        *(step, scale, scale / 2, math.inf, True),
        verdict=Verdict.SKIP,
        cause=cause,
        culprits=(culprit, "neck") if culprit else (),
        **more,
    )


def record(path, *, describe=True):
    """Four good steps, three bad ones, a retried one, at 4 steps a second."""
    journal = Journal(path)
    if describe:
        journal.describe(rule="dynamic:growth_interval=2", parameters={"body": 8})
    journal.sample(0, {"body": SAMPLE["neck"]})
    journal.step(Step(0, 8.0, 8.0, amax=4.0, seconds=0.25))
    journal.step(Step(1, 8.0, 16.0, amax=4.0, seconds=0.25))
    journal.step(skip(2, 16.0, seconds=0.25))
    journal.step(skip(3, 8.0, culprit="[b]head", seconds=0.25))
    journal.step(skip(4, 4.0, seconds=0.25))
    journal.step(skip(5, 2.0, cause=Cause.LOSS_NONFINITE, culprit=None, seconds=0.25))
    journal.sample(6, SAMPLE)
    journal.step(
        Step(6, 2.0, 2.0, amax=65504 / 8, loss=0.5, norm=1.5, lr=1e-3, retries=2, seconds=0.25)
    )
    return journal


def frame(path, age=0.5):
    tail = Tail(path)
    assert tail.look()
    return tail.view.frame(age)


def picture(frame, run="RUN", findings=()):
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(drawn(frame, run, findings))
    return console.export_text()


# folding


def test_a_frame_shows_the_whole_run(tmp_path):
    record(tmp_path / "journal.jsonl").close()
    seen = frame(tmp_path)
    (lane,) = seen.lanes
    assert (lane.key, lane.steps, lane.skipped, lane.last.headroom()) == ("", 7, 4, 3.0)
    assert (lane.last.step, lane.last.loss, lane.last.norm) == (6, 0.5, 1.5)
    assert lane.trail == (3.0, 3.0, 4.0, 3.0, 2.0, 1.0, 1.0)
    assert seen.header["rule"] == "dynamic:growth_interval=2"
    assert seen.causes == {"overflow": 3, "loss non-finite": 1}
    assert seen.culprits == [("body", 2), ("[b]head", 1)]
    assert (seen.retries, seen.resumes, seen.damaged) == (2, 0, 0)
    assert seen.rate == 4.0
    # flushed: zero, or below 2^-25, which the neck's smallest is not
    assert seen.worst == [("[b]head", 0.75, 0.0), ("body", 0.5, 0.5), ("neck", 0.0, 0.25)]
    assert seen.sampled == 6


def test_each_loss_has_a_lane_and_they_share_the_time(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        for i in range(10):
            journal.step(Step(i, 8.0, 8.0, key="generator", seconds=0.125))
            journal.step(skip(i, 4.0, key="critic", seconds=0.125))
    seen = frame(tmp_path / "run.jsonl")
    told = [(lane.key, lane.last.step, lane.steps, lane.skipped) for lane in seen.lanes]
    assert told == [("generator", 9, 10, 0), ("critic", 9, 10, 10)]
    assert seen.rate == 4.0  # eight lines a second, two of them a step


def test_throughput_is_of_the_last_steps():
    view = View()
    view.add(Run(steps=[Step(i, 8.0, 8.0, seconds=10.0) for i in range(100)]))
    view.add(Run(steps=[Step(i, 8.0, 8.0, seconds=0.5) for i in range(50)]))
    assert view.frame(0.0).rate == 2.0


@pytest.mark.parametrize(
    ("age", "seconds", "still"),
    [(9.0, 0.1, False), (11.0, 0.1, True), (100.0, 10.0, False), (201.0, 10.0, True)],
)
def test_a_job_that_stands_still_is_noticed(age, seconds, still):
    view = View()
    view.add(Run(steps=[Step(0, 8.0, 8.0, seconds=seconds)]))
    assert view.frame(age).stands_still is still
    assert ("the job hangs" in picture(view.frame(age))) is still


def test_a_run_without_a_step_has_a_minute_to_start():
    assert not View().frame(59.0).stands_still
    assert View().frame(61.0).stands_still


@pytest.mark.parametrize("dip", [0, 1, 2, 3, 100, 613, 998, 999])
def test_a_trail_keeps_every_dip(dip):
    trail = Trail(most=8)
    for i in range(1000):
        trail.add(2.0 if i == dip else 16.0)
    assert len(trail.values) == 8  # of 128 steps each
    assert sorted(set(trail.values)) == [1.0, 4.0]
    assert trail.values.index(1.0) == dip // 128


# tailing


def test_only_what_was_appended_is_read(tmp_path, monkeypatch):
    journal = record(tmp_path / "journal.jsonl")
    tail = Tail(tmp_path)
    tail.look()
    read = []
    take = Tail._take
    monkeypatch.setattr(Tail, "_take", lambda self, b, p: (read.append(len(b)), take(self, b, p)))
    tail.look()
    assert read == []
    before = (tmp_path / "journal.jsonl").stat().st_size
    journal.step(Step(7, 2.0, 2.0))
    tail.look()
    assert read == [(tmp_path / "journal.jsonl").stat().st_size - before]
    assert tail.view.frame(0.0).lanes[0].last.step == 7


def test_any_cut_gives_the_same_picture_in_the_end(tmp_path):
    record(tmp_path / "whole.jsonl").close()
    whole = frame(tmp_path / "whole.jsonl")
    data = (tmp_path / "whole.jsonl").read_bytes()
    grown = tmp_path / "grown.jsonl"
    for piece in (1, 7, 100):
        grown.unlink(missing_ok=True)
        tail = Tail(grown)
        assert not tail.look()
        for i in range(0, len(data), piece):
            with open(grown, "ab") as file:
                file.write(data[i : i + piece])
            assert tail.look()
        assert repr(tail.view.frame(0.5)) == repr(whole)  # as text: NaN is not NaN


def test_a_long_journal_is_read_in_blocks(tmp_path, monkeypatch):
    record(tmp_path / "journal.jsonl").close()
    whole = frame(tmp_path)
    monkeypatch.setattr("gradlift.cli._view._BLOCK", 64)
    assert repr(frame(tmp_path)) == repr(whole)


def test_a_cut_off_and_resumed_run(tmp_path):
    path = tmp_path / "journal.jsonl"
    record(path).close()
    path.write_bytes(path.read_bytes()[:-20])
    tail = Tail(path)
    tail.look()
    assert tail.view.frame(0.0).lanes[0].last.step == 5
    with Journal(path) as journal:
        journal.step(Step(6, 2.0, 2.0))
    tail.look()
    seen = tail.view.frame(0.0)
    assert (seen.lanes[0].last.step, seen.resumes, seen.damaged) == (6, 1, 1)
    assert repr(frame(path, 0.0)) == repr(seen)


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path):
    path = tmp_path / "journal.jsonl"
    record(path).close()
    tail = Tail(path)
    tail.look()
    path.write_bytes(b"")
    with Journal(path) as journal:
        journal.step(Step(0, 4.0, 4.0))
    tail.look()
    (lane,) = tail.view.frame(0.0).lanes
    assert (lane.last.step, lane.steps) == (0, 1)
    longer = tmp_path / "longer.jsonl"
    record(longer).close()
    longer.replace(path)
    assert tail.look()
    assert tail.view.frame(0.0) == frame(path, 0.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04 a zip", "is not a gradlift journal"),
        (b"hello\nworld\n", "is not a gradlift journal"),
        (b'{"kind":"header","schema":99,"time":0}\n', "written by a later gradlift"),
    ],
)
def test_what_is_not_a_journal_is_refused(content, says, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=says):
        Tail(path).look()


# drawing


def test_the_picture(tmp_path):
    record(tmp_path / "journal.jsonl").close()
    lines = [line.strip() for line in picture(frame(tmp_path)).splitlines()]
    words = [" ".join(line.split()) for line in lines]
    assert words[:2] == ["RUN", "rule dynamic:growth_interval=2, 4 steps/s"]
    assert "6 2^1 0.5 1.5 3.0 bits 0.001 4 of 7" in words
    assert "scale so far ▆▆█▆▃▁▁ 2^1 to 2^4" in words
    assert "skipped: 3 overflow, 1 loss non-finite; retried: 2" in words
    assert words[words.index("most often the first culprit times") + 2] == "body 2"
    assert words[words.index("most flushed, at step 6 flushed subnormal") + 2 :][:3] == [
        "[b]head 75.0 % 0 %",
        "body 50.0 % 50.0 %",
        "neck 0 % 25.0 %",
    ]
    assert words[-1] == "last line 500 ms ago"


def test_the_picture_of_two_losses_names_them():
    view = View()
    view.add(Run(steps=[Step(0, 8.0, 8.0, key="[red]"), Step(0, 4.0, 2.0, key="critic")]))
    words = [" ".join(line.split()) for line in picture(view.frame(0.0)).splitlines()]
    assert "loss of step scale loss norm headroom lr skipped" in words
    assert "[red] 0 2^3 - - - - 0 of 1" in words
    assert "critic 0 2^1 - - - - 0 of 1" in words


def test_the_picture_of_an_empty_run():
    words = [" ".join(line.split()) for line in picture(View().frame(1.0)).splitlines()]
    assert words == [
        "RUN",
        "rule unknown",
        "",
        "no steps yet",
        "",
        "skipped: none",
        "last line 1 s ago",
    ]


def test_numbers_that_are_none_are_drawn():
    view = View()
    view.add(Run(steps=[Step(0, math.inf, 0.0, amax=math.nan, loss=-math.inf)]))
    assert "-inf" in picture(view.frame(math.inf))


# the command


def test_once_on_a_folder_and_on_a_file(tmp_path):
    record(tmp_path / "journal.jsonl").close()
    for run in (tmp_path, tmp_path / "journal.jsonl"):
        done = CliRunner().invoke(watch, [str(run), "--once"])
        assert done.exit_code == 0, done.output
        assert "skipped: 3 overflow, 1 loss non-finite; retried: 2" in done.output


def test_once_on_an_empty_file(tmp_path):
    (tmp_path / "journal.jsonl").touch()
    done = CliRunner().invoke(watch, [str(tmp_path), "--once"])
    assert (done.exit_code, "no steps yet" in done.output) == (0, True)


def test_once_on_nothing_is_an_error(tmp_path):
    done = CliRunner().invoke(watch, [str(tmp_path / "nowhere"), "--once"])
    assert isinstance(done.exception, JournalError)
    assert "there is no journal yet" in str(done.exception)


def run_watch(folder, *arguments, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "gradlift", "watch", "run", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )


def test_it_follows_a_job_in_another_process(tmp_path):
    """A process that appends and stays alive; `--once` in another one sees what it wrote."""
    job = textwrap.dedent(
        """
        import sys
        from gradlift import Journal
        from gradlift.journal import Step

        journal = Journal(sys.argv[1])
        journal.describe(rule="auto")
        for i in range(3):
            for j in range(10):
                journal.step(Step(10 * i + j, 8.0, 8.0, seconds=0.5))
            print("ready", flush=True)
            sys.stdin.readline()
        """
    )
    path = tmp_path / "run" / "journal.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-c", job, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for i in range(3):
            assert running.stdout.readline() == "ready\n"
            out, err = run_watch(tmp_path, "--once").communicate(timeout=120)
            assert f"0 of {10 * (i + 1)}" in out, err
            assert "rule auto, 2 steps/s" in out
            running.stdin.write("go on\n")
            running.stdin.flush()
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.stdin.close()
        running.stdout.close()


def read_until(process, text):
    said = ""
    while text not in said:
        more = process.stdout.read(1)
        assert more, f"it ended after {said!r}: {process.stderr.read()}"
        said += more


def test_it_waits_for_a_run_and_ends_cleanly_on_ctrl_c(tmp_path):
    """On a terminal of its own, as far as rich knows: every picture is written at once."""
    settings = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
    watching = run_watch(tmp_path, "--interval", "0.05", **settings)
    guard = threading.Timer(120, watching.kill)
    guard.start()
    try:
        read_until(watching, "there is no journal yet")
        record(tmp_path / "run" / "journal.jsonl").close()
        read_until(watching, "3 overflow")
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=60)
        assert (watching.returncode, err) == (0, "")
    finally:
        guard.cancel()
        watching.kill()


# findings


def grow(journal, steps, **facts):
    for i in steps:
        journal.step(Step(i, 1000.0, 1000.0, **facts))


def test_findings_appear_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("gradlift.cli._view._SHARE", 1e9)  # no waiting
    journal, tail = Journal(tmp_path / "journal.jsonl"), Tail(tmp_path)
    doctor = FindingsSoFar(tmp_path)
    journal.describe(rule="dynamic", mode="run")
    for i in range(3):
        journal.step(Step(i, 8.0, 8.0))
    assert tail.look()
    assert doctor.look(tail.read) == []  # nor that the journal has no ending
    for i in range(3, 30):
        journal.step(skip(i, 2.0**-i))
    assert tail.look()
    found = doctor.look(tail.read)
    assert [f.kind for f in found] == ["floor"]
    shown = " ".join(picture(frame(tmp_path), findings=found).split())
    assert f"broken {found[0].title}" in shown
    assert f"-> {found[0].advice.split()[0]}" in shown


def test_a_journal_that_has_not_grown_is_not_read_again(tmp_path, monkeypatch):
    record(tmp_path / "journal.jsonl").close()
    monkeypatch.setattr("gradlift.cli._view._SHARE", 1e9)
    read = []
    monkeypatch.setattr("gradlift.cli._view.diagnose", lambda run: read.append(run) or [])
    doctor = FindingsSoFar(tmp_path)
    for size in (100, 100, 200, 2**40):
        doctor.look(size)
    assert len(read) == 2  # one that grows without end is not read as a whole


def test_looking_for_findings_takes_a_tenth_of_the_time(tmp_path, monkeypatch):
    record(tmp_path / "journal.jsonl").close()
    clock = [0.0]
    monkeypatch.setattr("gradlift.cli._view.time.monotonic", lambda: clock[0])
    read = []

    def slow(run):
        read.append(clock[0])
        clock[0] += 2.0
        return []

    monkeypatch.setattr("gradlift.cli._view.diagnose", slow)
    doctor = FindingsSoFar(tmp_path)
    for size in range(1, 100):
        doctor.look(size)
        clock[0] += 1.0
    assert read == [0.0, 22.0, 44.0, 66.0, 88.0]

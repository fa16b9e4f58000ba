"""The journal: what is written comes back; what is damaged is reported and harms nothing else."""

import errno
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
import weakref

import numpy as np
import pytest

from gradlift import Cause, Journal, Verdict, read_journal
from gradlift.errors import JournalError, JournalWarning
from gradlift.journal import Event, Step, writer

STEPS = [
    Step(0, 65536.0, 65536.0, amax=812.5, loss=0.25, norm=0.4, lr=1e-3, seconds=0.125),
    Step(
        1,
        65536.0,
        32768.0,
        amax=math.inf,
        nonfinite=True,
        verdict=Verdict.SKIP,
        cause=Cause.OVERFLOW,
        culprits=("</script>", "head.wéight"),
        retries=2,
        probe_amax=3.0,
    ),
    Step(2, 32768.0, 32768.0, amax=0.0, loss=math.inf, verdict=None),
]


def write(path, steps=STEPS):
    with Journal(path) as journal:
        journal.describe(rule="dynamic", world_size=2, parameters={"head.wéight": 8})
        for step in steps:
            journal.step(step)
        journal.event("note", 2, text="cooling down")
        journal.sample(2, {"head.wéight": {"zero": 0.5, "histogram": {"-3": 4}}})


def same(a, b):
    return all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    write(path)
    run = read_journal(path)
    assert len(run.steps) == 3
    assert all(same(a, b) for a, b in zip(run.steps, STEPS))
    assert run.events == [Event(2, "note", {"text": "cooling down"})]
    assert run.samples[0].parameters["head.wéight"]["zero"] == 0.5
    assert run.header["rule"] == "dynamic"
    assert run.header["parameters"] == {"head.wéight": 8}
    assert {"python", "gradlift", "numpy"} <= set(run.header["versions"])
    assert run.skipped == 1
    assert run.undecided == 1


def test_every_line_is_strict_json(tmp_path):
    write(tmp_path / "run.jsonl")

    def refuse(token):
        raise AssertionError(token)

    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_numpy_scalars_are_numbers(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        journal.step(Step(np.int64(0), np.float32(8), np.float32(8), amax=np.float32("inf")))
    step = read_journal(tmp_path / "run.jsonl").steps[0]
    assert (step.step, step.scale, step.amax) == (0, 8.0, math.inf)


def test_cut_at_every_byte(tmp_path):
    write(tmp_path / "whole.jsonl")
    data = (tmp_path / "whole.jsonl").read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        complete = sum(end <= size for end in ends)  # a line is whole without its line end
        if size in (end + 1 for end in ends) or size in ends:
            run = read_journal(cut)  # no warning: nothing is missing
        else:
            with pytest.warns(JournalWarning) as caught:
                run = read_journal(cut)
            assert len(caught) == 1
            assert "\n" not in str(caught[0].message)
        kinds = 1 if run.header else 0
        assert kinds + len(run.steps) + len(run.events) + len(run.samples) == complete


def test_continued_after_a_cut(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-10])
    with Journal(path) as journal:
        journal.step(Step(3, 8.0, 8.0))
    with pytest.warns(JournalWarning, match="1 damaged or cut-off line left out, 4 steps read"):
        run = read_journal(path)
    assert run.steps[-1].step == 3
    assert run.events[-1].what == "resume"
    assert run.events[-1].step == 2


def test_killed_in_the_middle_of_a_write(tmp_path):
    """After any number of bytes of a line: those before it and those after it are whole."""
    path = tmp_path / "run.jsonl"
    write(path)
    before = path.read_bytes()
    with Journal(path) as journal:
        journal.step(Step(3, 8.0, 8.0))
    line = path.read_bytes().removeprefix(before).split(b"\n")[1] + b"\n"
    for k in range(1, len(line) + 1):
        path.write_bytes(before)
        child = os.fork()
        if child == 0:
            journal = Journal(path)
            journal._lines.file = DyingFile(journal._lines.file, after=k)
            journal.step(Step(3, 8.0, 8.0))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with Journal(path) as journal:
            journal.step(Step(4, 8.0, 8.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JournalWarning)
            steps = [s.step for s in read_journal(path).steps]
        assert steps == [0, 1, 2, *([3] if k >= len(line) - 1 else []), 4]


class DyingFile:
    """Writes the header; of the next line only so many bytes, and then its process is killed."""

    def __init__(self, file, after):
        self.file, self.after, self.calls = file, after, 0

    def write(self, data):
        self.calls += 1
        if self.calls == 1:
            return self.file.write(data)
        self.file.write(data[: self.after])
        os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_fsync_follows_each_line(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Journal(tmp_path / "run.jsonl", fsync=True) as journal:
        journal.step(Step(0, 8.0, 8.0))
        journal.step(Step(1, 8.0, 8.0))
    assert len(synced) == 3  # the header is a line too
    assert synced[-1] == (tmp_path / "run.jsonl").stat().st_size


def test_an_fsync_that_fails_warns_once_and_loses_nothing(tmp_path, monkeypatch):
    def fails(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with Journal(tmp_path / "run.jsonl", fsync=True) as journal:
        with pytest.warns(JournalWarning, match="fsync: Input/output error"):
            journal.step(Step(0, 8.0, 8.0))
        journal.step(Step(1, 8.0, 8.0))
    assert numbers(tmp_path / "run.jsonl") == [0, 1]


def test_empty_and_unknown_fields(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"")
    with pytest.warns(JournalWarning, match="is empty"):
        assert read_journal(path).steps == []
    write(path)
    with open(path, "a") as file:
        file.write('{"kind":"step","step":9,"scale":8.0,"next_scale":8.0,"mood":"good"}\n')
        file.write('{"kind":"weather","sun":true}\n')
    assert read_journal(path).steps[-1].step == 9


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "3",
        '{"kind":"step"}',
        '{"kind":"step","step":"1","scale":8,"next_scale":8}',
        '{"kind":"step","step":1,"scale":"big","next_scale":8}',
        '{"kind":"step","step":1,"scale":8,"next_scale":8,"verdict":"maybe"}',
        '{"kind":"step","step":1,"scale":8,"next_scale":8,"cause":"FATE"}',
        '{"kind":"step","step":1,"scale":8,"next_scale":8}, {"kind":"step"',
        '{"kind":"sample","step":1,"parameters":7}',
        '{"a":1},{"b":2}',
        "",
    ],
)
def test_a_damaged_line_harms_no_other(tmp_path, line):
    path = tmp_path / "run.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    lines.insert(2, line)
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(JournalWarning, match="1 damaged"):
        assert [s.step for s in read_journal(path).steps] == [0, 1, 2]


def test_a_later_schema_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"header","schema":2}\n{"kind":"leap"}\n')
    for use in (read_journal, Journal):
        with pytest.raises(JournalError, match=r"later gradlift \(schema 2, this one reads 1\)"):
            use(path)


@pytest.mark.parametrize("text", ["hello\n", '{"loss": 1}\n', "\n", "\x00\x01", "{", "[1]\n"])
def test_not_a_journal(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    if text == "{":  # could be the very first byte of a header
        with pytest.warns(JournalWarning):
            assert read_journal(path).steps == []
        return
    for use in (read_journal, Journal):
        with pytest.raises(JournalError, match="not a gradlift journal"):
            use(path)
    assert path.read_text() == text
    with pytest.raises(JournalError, match="cannot read"):
        read_journal(tmp_path / "nowhere.jsonl")


WRITER = """
import sys
from gradlift import Journal
from gradlift.journal import Step
journal = Journal(sys.argv[1])
step = 0
while True:
    journal.step(Step(step, 65536.0, 65536.0, amax=1.5, loss=0.25, norm=0.5, lr=1e-3))
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    step += 1
"""


def test_killed_fifty_times(tmp_path):
    """What the writer said it had written is there; at most one line is damaged."""
    rng = random.Random(0)
    for i in range(50):
        path = tmp_path / f"{i}.jsonl"
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait(timeout=30)
        said = [int(s) for s in rest.split("\n")[:-1]] or [0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = read_journal(path)
        assert all("1 damaged or cut-off line " in str(w.message) for w in caught)
        assert [s.step for s in run.steps] == list(range(len(run.steps)))
        assert len(run.steps) > said[-1]


def test_what_cannot_be_written_does_not_spoil_the_rest(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path) as journal:
        with pytest.raises(JournalError, match="'kind' is a reserved name of the journal"):
            journal.describe(kind="mine")
        with pytest.raises(JournalError, match="'kind' is a reserved name of the journal"):
            journal.event("note", kind="mine")
        journal.describe(bad={(1, 2): 3})
        with pytest.raises(JournalError, match="cannot be written as JSON"):
            journal.step(Step(0, 8.0, 8.0))
        journal.describe(bad="no longer")
        journal.step(Step(1, 8.0, 8.0, key="d"))
    run = read_journal(path)
    assert run.header["bad"] == "no longer"
    assert [(s.step, s.key) for s in run.steps] == [(1, "d")]


def test_numbers_too_large_are_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    with open(path, "a") as file:
        file.write('{"kind":"step","step":3,"scale":8.0,"next_scale":8.0,"retries":Infinity}\n')
    with pytest.warns(JournalWarning, match="1 damaged"):
        assert len(read_journal(path).steps) == 3


def test_a_forked_child_writes_nothing_into_its_parents_run(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        journal.step(Step(0, 8.0, 8.0))
        child = os.fork()
        if child == 0:
            journal.step(Step(99, 8.0, 8.0))
            os._exit(0)
        os.waitpid(child, 0)
        journal.step(Step(1, 8.0, 8.0))
    assert [s.step for s in read_journal(tmp_path / "run.jsonl").steps] == [0, 1]


def test_two_processes_do_not_mix_their_lines(tmp_path):
    """Two ranks with one path; a reader, and this process itself, may open it as they like."""
    path = tmp_path / "run.jsonl"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        writer.stdout.readline()
        late = Journal(path)
        with pytest.raises(JournalError, match=r"written by another process.*rank 0 alone"):
            late.step(Step(0, 8.0, 8.0))
    finally:
        writer.kill()
        writer.wait(timeout=30)
    late.event("late")  # it has died
    with Journal(path) as again:
        again.event("again")
    told = [e.what for e in read_journal(path).events]
    assert [what for what in told if what != "resume"] == ["late", "again"]


# A file that cannot be written


PLENTY = 2**30


class Stubborn:
    """A file that takes at most `room` bytes; with `fixed` it cannot be cut off, like a pipe."""

    def __init__(self, file, room, fixed=False):
        self.file, self.room, self.fixed = file, room, fixed

    def write(self, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def truncate(self, size):
        if self.fixed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.room += os.fstat(self.file.fileno()).st_size - size
        return self.file.truncate(size)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """A journal with one line, and its file, which has room for so many bytes more."""
    monkeypatch.setattr(writer, "_PAUSE", 0.0)

    made = weakref.WeakSet()

    def make(room, fixed=False):
        journal = Journal(tmp_path / "run.jsonl")
        made.add(journal)
        journal.step(Step(0, 8.0, 8.0))
        file = journal._lines.file = Stubborn(journal._lines.file, room, fixed)
        return journal, file

    yield make
    for journal in list(made):
        journal.close()


def test_a_journal_that_is_dropped_writes_what_waits_and_closes(limited, recwarn):
    journal, file = limited(room=0)
    with pytest.warns(JournalWarning, match="Training goes on"):
        journal.step(Step(1, 8.0, 8.0))
    file.room, path = PLENTY, journal.path
    del journal
    gc.collect()
    assert file.closed
    assert numbers(path) == [0, 1]
    assert not recwarn.list


def numbers(path):
    return [s.step for s in read_journal(path).steps]


def test_a_short_write_leaves_whole_lines_and_nothing_is_lost(limited):
    journal, file = limited(room=10)
    with pytest.warns(JournalWarning, match=r"10 of \d+ bytes were written. Training goes on"):
        journal.step(Step(1, 8.0, 8.0))
    assert numbers(journal.path) == [0]  # no warning of a damaged line
    journal.step(Step(2, 8.0, 8.0))  # and no second one that it cannot be written
    file.room = PLENTY
    journal.step(Step(3, 8.0, 8.0))
    assert numbers(journal.path) == [0, 1, 2, 3]
    journal.close()


@pytest.mark.parametrize("room", range(1, 60))
def test_a_torn_line_spoils_no_other(limited, room):
    """Where it cannot be cut off again; at whatever byte it ends, each step is there once."""
    journal, file = limited(room, fixed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JournalWarning)
        journal.step(Step(1, 8.0, 8.0))
        journal.step(Step(2, 8.0, 8.0))
        file.room = PLENTY
        journal.step(Step(3, 8.0, 8.0))
        journal.close()
        assert numbers(journal.path) == [0, 1, 2, 3]


def test_a_full_disk_costs_no_training_and_one_warning(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    journal = Journal("/dev/full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(5):
            journal.step(Step(i, 8.0, 8.0))
    assert len(caught) == 1
    assert "No space left on device" in str(caught[0].message)
    with pytest.warns(JournalWarning, match="lacks its last 6 lines: No space left"):
        journal.close()


def test_the_backlog_is_bounded_and_what_was_dropped_is_counted(limited, monkeypatch):
    journal, file = limited(room=0)
    size = len(writer._line({"kind": "step", "step": 1, "scale": 8.0, "next_scale": 8.0}))
    monkeypatch.setattr(writer, "_BACKLOG", 3 * size)
    with pytest.warns(JournalWarning):
        journal.step(Step(1, 8.0, 8.0))
    for i in range(2, 9):
        journal.step(Step(i, 8.0, 8.0))
    assert journal._lines.size == 3 * size
    file.room = PLENTY
    journal.step(Step(9, 8.0, 8.0))  # what waits comes first, so there is room for this one
    file.room = 0
    for i in (10, 11):  # what was written takes no more room
        journal.step(Step(i, 8.0, 8.0))
    file.room = PLENTY
    journal.close()
    run = read_journal(journal.path)
    assert [s.step for s in run.steps] == [0, 1, 2, 3, 9, 10, 11]
    (note,) = run.events
    assert (note.detail["code"], note.detail["dropped"]) == ("lines-dropped", 5)


def test_the_count_of_dropped_lines_is_written_even_if_it_fails_at_first(limited, monkeypatch):
    journal, file = limited(room=0)
    monkeypatch.setattr(writer, "_BACKLOG", 0)
    with pytest.warns(JournalWarning):
        journal.step(Step(1, 8.0, 8.0))
    journal.step(Step(2, 8.0, 8.0))
    file.room = PLENTY
    journal.step(Step(3, 8.0, 8.0))
    run = read_journal(journal.path)
    assert [e.detail["dropped"] for e in run.events] == [2]
    assert [s.step for s in run.steps] == [0, 3]


def test_closing_writes_what_waits(limited):
    journal, file = limited(room=0)
    with pytest.warns(JournalWarning):
        journal.step(Step(1, 8.0, 8.0))
    journal._lines.again_at = math.inf  # it is not yet time for another attempt
    file.room = PLENTY
    journal.step(Step(2, 8.0, 8.0))
    assert numbers(journal.path) == [0]
    journal.close()
    assert numbers(journal.path) == [0, 1, 2]


def test_a_strict_process_keeps_the_line_that_could_not_be_written(limited):
    journal, file = limited(room=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(JournalWarning):
            journal.step(Step(1, 8.0, 8.0))
    file.room = PLENTY
    journal.step(Step(2, 8.0, 8.0))
    assert numbers(journal.path) == [0, 1, 2]

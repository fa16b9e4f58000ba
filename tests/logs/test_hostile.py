"""Logs that are damaged, foreign, huge or made to do harm."""

import random
import struct
import time
import tracemalloc
import zlib

import pytest
from click.testing import CliRunner
from helpers.logs import deepspeed, deepspeed_step, file, megatron, trainer

from gradlift import diagnose
from gradlift.cli._group import gradlift
from gradlift.cli._view import FindingsSoFar, Tail
from gradlift.errors import JournalError
from gradlift.logs import LogReader, assembly, read_log
from gradlift.report import html
from gradlift.report import text as text_report

LINES = [
    deepspeed(16, 8),
    deepspeed_step(10, 1),
    megatron(11, 2.5, 8.0, 1.0),
    trainer("2.5", "nan"),
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in f',
    "ValueError: no",
]


def brief(run):
    return [(s.step, s.scale, s.next_scale, s.skipped) for s in run.steps]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-mark"])
def test_encodings(encoding, tmp_path):
    text = "\r\n".join(["größe ▉", *LINES])
    data = (
        b"\xff\xfe" + text.encode("utf-16-le")
        if encoding == "utf-16-le-mark"
        else text.encode(encoding)
    )
    path = tmp_path / "run.log"
    path.write_bytes(data)
    assert brief(read_log(path)) == brief(read_log(file(tmp_path / "plain.log", LINES)))


def test_bytes_that_are_no_text_between_the_lines(tmp_path):
    noise = random.Random(0).randbytes(3000).replace(b"\n", b"").replace(b"\r", b"")
    path = tmp_path / "run.log"
    path.write_bytes(noise.join(line.encode() + b"\n" for line in LINES[:3]))
    assert [s.step for s in read_log(path).steps][-1] == 11


def test_zeros_in_front(tmp_path):
    """Of a log that was cut while its writer held it open."""
    path = tmp_path / "run.log"
    path.write_bytes(b"\0" * 70_000 + b"iter 3: loss 2.5, time 1ms\n")
    assert [s.step for s in read_log(path).steps] == [3]


def test_blocks_may_end_anywhere(tmp_path):
    data = ("\r\n".join(LINES) + "\n").encode()
    whole = read_log(file(tmp_path / "run.log", LINES))
    for size in (1, 7, 64):
        reader = LogReader()
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size])
        assert brief(reader.end()) == brief(whole)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_lines_raise_nothing(seed, tmp_path):
    """Bytes, lines and pieces of lines changed at random, and every command on what remains."""
    rng = random.Random(seed)
    data = bytearray(("\n".join(LINES * 5) + "\n").encode())
    for _ in range(60):
        at = rng.randrange(len(data))
        what = rng.randrange(4)
        if what == 0:
            data[at] = rng.randrange(256)
        elif what == 1:
            del data[at : at + rng.randrange(30)]
        elif what == 2:
            data[at:at] = rng.choice([b"9" * 500, b"1e999", b"-1", b"nan", b"\x1b[31m", b"{" * 90])
        else:
            data[at:at] = data[at : at + rng.randrange(200)]
    path = tmp_path / "run.log"
    path.write_bytes(bytes(data))
    for words in (["doctor"], ["doctor", "-v", "--events"], ["doctor", "--json"], ["report"],
                  ["report", "--text"], ["watch", "--once"]):  # fmt: skip
        done = CliRunner().invoke(gradlift, [*words, str(path)])
        assert done.exit_code in (0, 1, 2), (words, done.output)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "\x1b" not in done.output


def test_nothing_of_a_log_steers_a_terminal(tmp_path):
    lines = [deepspeed_step(5, 0), *LINES[4:6], "Value\x9bError: \x07\u202ered\x9b31m"]
    path = file(tmp_path / "run.log", lines)
    path.write_bytes(path.read_bytes() + b"ValueError: \x07bell \xc2\x9b31m \xe2\x80\xae\n")
    run = read_log(path)
    shown = html(run) + text_report(run) + str(diagnose(run)) + str(run.events)
    assert not set(shown) & set("\x07\x9b\u202e\x1b")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("trainer_state.json", b'{"log_history": [' + b"[" * 200_000),
        ("trainer_state.json", b'{"log_history": 3}'),
        ("trainer_state.json", b"[1]"),
        ("trainer_state.json", b'{"log_history": [{"step": 1e400, "loss": [], "grad_norm": {}}]}'),
        ("events.out.tfevents.1.host", b"\xff" * 100),
        ("events.out.tfevents.1.host", struct.pack("<Q", 2**50) + b"\0" * 100),
        ("metrics.csv", b'step,loss\n"' + b"x" * 300_000),
        ("run.log", b""),
        ("run.log", b"\0" * 100_000),
        ("run.log", b"iteration " + b"9" * 5000 + b"/ 1 | elapsed time per iteration | x |"),
    ],
)
def test_damaged_files_are_refused_in_words(name, data, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(JournalError):
        read_log(path)


def record(payload):
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", 0)


def test_event_records_that_are_damaged_end_the_file(tmp_path):
    scalar = b"\x0a\x04loss\x15" + struct.pack("<f", 2.5)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    event = b"\x10\x07\x2a" + bytes([len(summary)]) + summary
    path = tmp_path / "events.out.tfevents.1.host"
    for bad in (b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 12, b"\x2a\x03\x0a\x7f\x00"):
        path.write_bytes(record(event) + record(bad) + record(event))
        assert [(s.step, s.loss) for s in read_log(path).steps] == [(7, 2.5)]


def test_a_long_log_is_thinned_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "MOST_STEPS", 1000)
    lines = [f"iter {i}: loss {2 + i % 7}, time 9ms" for i in range(5000)]
    lines[2500] = "iter 2500: loss nan, time 9ms"
    run = read_log(file(tmp_path / "run.log", lines))
    assert len(run.steps) <= 1000
    assert run.header["left_out"] + len(run.steps) == 5000
    assert 2500 in [s.step for s in run.steps]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """What is held does not grow with the log."""
    monkeypatch.setattr(assembly, "MOST_STEPS", 1000)
    line = (megatron(7, 2.5, 8.0, 1.0) + "\n").encode()

    def peak(times):
        reader = LogReader()
        tracemalloc.start()
        for _ in range(times):
            reader.feed(line * 100)
        reader.end()
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(1)
    assert peak(60) < 1.5 * peak(15) + 100_000


def test_a_line_without_end_is_no_burden():
    reader = LogReader()
    for _ in range(20):
        reader.feed(b"x it/s Traceback 'loss': {" * 4000)
    reader.feed(b"\niter 3: loss 2.5, time 9ms\n")
    assert reader.end().steps[-1].step == 3


@pytest.mark.parametrize("line", [
    "iteration 1/ 2 | elapsed time per iteration |" + " " * 15_000 + "|",
    "num_updates= " + "1/1 [aaa, a=" * 1_300,
    "num_updates= " + "1/1 [aaa,a, a=" * 1_100,
    " - loss: " + "1/1 ------ " * 1_400,
    "Train Metrics (step 1) - " + ": |" * 5_000,
    "OVERFLOW!" + "  a" * 5_400,
    ("a" * 59 + ":" + " " * 9) * 230 + "it/s",
], ids=range(7))  # fmt: skip
def test_no_line_costs_much(line):
    """Ten megabytes of it are read in less than a minute."""
    reader = LogReader()
    begun = time.process_time()
    for _ in range(10):
        reader.feed(line.encode() + b"\n")
    assert time.process_time() - begun < 60 * 10 * len(line) / 1e7 + 0.5


def test_links_and_pipes_are_not_followed(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(JournalError, match="no regular file"):
        read_log(tmp_path / "pipe.log")
    secret = file(tmp_path / "secret.csv", ["step,loss", "1,2"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").symlink_to(secret)
    with pytest.raises(JournalError, match="holds no"):
        read_log(folder)


def test_a_growing_log_is_followed(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("starting\n")
    tail = Tail(path)
    assert tail.look()
    assert tail.view.frame(0.0).lanes == []
    for last in (20, 40):
        with open(path, "a") as out:
            out.writelines(deepspeed_step(i, 0) + "\n" for i in range(last - 19, last + 1))
        tail.look()
        [lane] = tail.view.frame(0.0).lanes
        assert lane.last.step == last - 1  # the last line may still be added to
    assert tail.view.frame(0.0).resumes == 0
    with open(path, "a") as out:
        out.writelines(deepspeed_step(i, 0) + "\n" for i in range(10, 15))
    tail.look()
    assert tail.view.frame(0.0).resumes == 1


def test_a_log_that_says_nothing_yet_is_waited_for(tmp_path):
    path = file(tmp_path / "run.log", ["loading data"])
    found = FindingsSoFar(path)
    assert found.look(13) == []
    done = CliRunner().invoke(gradlift, ["watch", "--once", str(path)])
    assert done.exit_code == 2
    assert "no line is of a known format" in done.output
    lines = [f"iter {i}: loss {2.5 if i < 9 else 'nan'}, time 9ms" for i in range(20)]
    file(path, lines)
    assert [f.kind for f in found.look(999)] == ["forward-nan"]


def scalars(path, steps):
    """A TensorBoard event file with a loss a step."""
    for step in steps:
        scalar = b"\x0a\x04loss\x15" + struct.pack("<f", 2.5)
        summary = b"\x0a" + bytes([len(scalar)]) + scalar
        payload = b"\x10" + bytes([step, 0x2A, len(summary)]) + summary
        with open(path, "ab") as out:
            out.write(record(payload))


def test_growing_files_that_are_no_text_are_followed(tmp_path):
    """Event files, a folder, a trainer_state.json, which is replaced."""
    folder = tmp_path / "out"
    tail = Tail(folder)
    assert not tail.look()
    folder.mkdir()
    assert not tail.look()
    events, state = folder / "events.out.tfevents.1.host", tmp_path / "trainer_state.json"

    def last(tail):
        tail._not_before = 0.0  # as if enough time had passed
        assert tail.look()
        return [lane.last.step for lane in tail.view.frame(0.0).lanes]

    assert not Tail(events).look()
    for step in (7, 9):
        scalars(events, [step])
        assert last(tail) == last(Tail(events)) == [step]
    assert tail.view.frame(0.0).lanes[0].steps == 2
    tail = Tail(state)
    for text, seen in (("{", []), ('{"log_history": [{"loss": 2.5, "step": 500}]}', [500])):
        state.write_text(text)
        assert last(tail) == seen
    for path in (folder, events, state):
        done = CliRunner().invoke(gradlift, ["watch", "--once", str(path)])
        assert (done.exit_code, "log of t" in done.output) == (0, True)


def test_a_pattern_holds_for_every_command(tmp_path):
    path = str(file(tmp_path / "run.log", ["s=1 l=2.5", "s=2 l=2.25"]))
    words = ["--pattern", r"s=(?P<step>\d+) l=(?P<loss>\S+)"]
    for command in (["doctor"], ["report", "--text"], ["watch", "--once"], ["compare", path]):
        done = CliRunner().invoke(gradlift, [*command, path, *words])
        assert done.exit_code == 0, done.output
        assert "2.5" in done.output or command == ["doctor"]
        assert CliRunner().invoke(gradlift, [*command, path]).exit_code == 2
        done = CliRunner().invoke(gradlift, [*command, path, "--format", "nanogpt"])
        assert done.exit_code == 2
        assert "Traceback" not in done.output

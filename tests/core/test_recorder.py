"""journal/recorder.py: channels, what each writes, in which order, and who is called back."""

import math
import os

import pytest

from gradlift import Cause, Reading, read_journal, rules
from gradlift.core import HALF_LOSS, Culprit, Finished, Note, conclude
from gradlift.journal import Channel, Journal, Recorder, channel, current, set_current
from gradlift.rules import Static

RULE = Static(8)
CLEAN = Reading(nonfinite=False, amax=4.0, norm=0.5)
OVERFLOW = Reading(nonfinite=True, amax=4.0, norm=math.inf)


def step(listener, number=0, reading=CLEAN, cause=Cause.NONE, **facts):
    done = Finished(number, RULE.init(), 8.0, reading, cause, **facts)
    return conclude(done, RULE, listener=listener)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def journal(path):
    with Journal(path) as journal:
        yield journal


def test_a_line_has_all_that_is_known(path, journal):
    step(
        Channel("mine", RULE, Recorder(journal)),
        reading=CLEAN._replace(probe_amax=6.0),
        loss=1.5,
        lr=0.1,
        retries=2,
        key="critic",
    )
    [line] = read_journal(path).steps
    assert (line.scale, line.next_scale, line.amax, line.norm) == (8.0, 8.0, 4.0, 0.5)
    assert (line.loss, line.lr, line.retries, line.probe_amax) == (1.5, 0.1, 2, 6.0)
    assert line.key == "critic"
    assert 0 <= line.seconds < 60


@pytest.mark.parametrize(
    "reading",
    [OVERFLOW, CLEAN._replace(checked=False, amax=0.0, norm=0.0)],
    ids=["overflow", "no gradients"],
)
def test_amax_and_norm_are_left_out_where_they_were_not_taken(path, journal, reading):
    cause = Cause.OVERFLOW if reading.nonfinite else Cause.NO_GRADIENTS
    result = step(Channel("mine", RULE, Recorder(journal)), 0, reading, cause)
    [line] = read_journal(path).steps
    assert math.isnan(line.amax)
    assert math.isnan(line.norm)
    assert math.isnan(result.grad_norm)


def test_an_unknown_amax_is_left_out(path, journal):
    step(Channel("mine", RULE, Recorder(journal)), reading=CLEAN._replace(amax=math.inf))
    [line] = read_journal(path).steps
    assert math.isnan(line.amax)
    assert line.norm == 0.5


def test_the_header(path, journal):
    told = Channel("mine", rules.parse("auto:format=e5m2"), Recorder(journal))
    told.describe(parameters={"w": 3}, world_size=2)
    assert not told.described
    step(told)
    assert told.described
    header = read_journal(path).header
    assert header["rule"] == "headroom:format=e5m2"
    assert (header["framework"], header["formats"]) == ("mine", ["e5m2"])
    assert (header["parameters"], header["world_size"]) == ({"w": 3}, 2)


def test_what_is_described_after_the_first_line_comes_too_late(path, journal):
    told = Channel("mine", RULE, Recorder(journal))
    step(told)
    told.describe(parameters={"w": 3})
    step(told, 1)
    run = read_journal(path)
    assert "parameters" not in run.header
    assert run.events == []


def test_the_second_scale_of_a_run_has_a_label(path, journal):
    recorder = Recorder(journal)
    first, second = (Channel(name, RULE, recorder) for name in ("a", "b"))
    step(second)  # the order is that of the first lines
    step(first)
    step(first, 1, key="critic")
    step(first, 2, OVERFLOW, Cause.OVERFLOW)
    step(second, 1, OVERFLOW, Cause.OVERFLOW, key="critic")
    run = read_journal(path)
    assert run.header["framework"] == "b"
    assert [s.key for s in run.steps] == ["", "scaler 2", "scaler 2/critic", "scaler 2", "critic"]
    note, *skips = run.events
    assert (note.what, note.detail["code"], note.detail["key"]) == ("note", "scale", "scaler 2")
    assert (note.detail["framework"], note.detail["rule"]) == ("a", "static:8")
    assert [e.detail.get("key") for e in skips] == ["scaler 2", "critic"]
    assert first.events[0].detail.get("key") is None  # it has no label for itself


def test_a_label_that_was_given(path, journal):
    step(Channel("mine", RULE, Recorder(journal), label="student"))
    run = read_journal(path)
    assert run.steps[0].key == "student"
    assert "rule" not in run.header  # it is in a note of its own


def test_an_event_is_in_the_journal_before_callbacks_are_called(path, journal):
    seen = []

    def on_event(event):
        run = read_journal(path)
        seen.append((event.what, [e.what for e in run.events], len(run.steps)))

    told = Channel("mine", RULE, Recorder(journal, on_event=on_event))
    culprits = (Culprit("w", "nan"),)
    step(told, 0, OVERFLOW, Cause.OVERFLOW, culprits=culprits, notes=(HALF_LOSS,))
    assert seen == [("skip", ["skip"], 0)]
    assert [e.what for e in read_journal(path).events] == ["skip", "note"]
    assert told.events[0].detail == {
        "cause": "OVERFLOW",
        "scale": 8.0,
        "next_scale": 8.0,
        "culprits": ["w (nan)"],
        "micro_batch": None,
    }


def test_callbacks_are_called_in_order():
    seen = []
    recorders = [Recorder(on_event=lambda e, i=i: seen.append((i, e.step))) for i in range(2)]
    told = Channel("mine", RULE, *recorders)
    for number in range(2):
        step(told, number, OVERFLOW, Cause.OVERFLOW)
    step(told, 2)
    step(told, 3, CLEAN._replace(checked=False), Cause.NO_GRADIENTS)
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert told.heard
    assert not told.recording


def test_a_note_for_the_whole_run_is_written_once(path, journal):
    told = Channel("mine", RULE, Recorder(journal))
    each = Note("left-out", "micro-batches left out: [1]")
    for number in range(2):
        step(told, number, notes=(HALF_LOSS, each))
    notes = [(e.step, e.detail["code"]) for e in read_journal(path).events]
    assert notes == [(0, "half-loss"), (0, "left-out"), (1, "left-out")]


def test_samples_go_to_the_journals_that_asked_for_them(tmp_path):
    with Journal(tmp_path / "a") as often, Journal(tmp_path / "b") as never:
        told = Channel("mine", RULE, Recorder(often, every=2), Recorder(never))
        assert [told.sample_due(n) for n in range(4)] == [True, False, True, False]
        for number in range(3):
            told.sample(number, {"w": {"zero": 0.5}})
    assert [s.step for s in read_journal(tmp_path / "a").samples] == [0, 2]
    assert not Channel("mine", RULE, Recorder(every=2)).sample_due(0)  # nobody keeps a journal


def test_the_run_around_gets_the_lines_too(tmp_path):
    with Journal(tmp_path / "own") as own, Journal(tmp_path / "around") as around:
        set_current(Recorder(around))
        try:
            told = channel("mine", RULE, journal=own)
        finally:
            set_current(None)
        step(told)
        step(channel("mine", RULE, journal=own), 1)
    assert len(read_journal(tmp_path / "own").steps) == 2
    assert len(read_journal(tmp_path / "around").steps) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_no_part_of_the_run():
    recorder = Recorder()
    set_current(recorder)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if current() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert current() is recorder
    finally:
        set_current(None)

"""Sinks beside the journal: told what is written, never able to harm it."""

import math
import warnings

import pytest

from gradlift import Journal, Verdict, read_journal
from gradlift.journal import Event, Sample, Step


class Recording:
    """A sink that remembers, and fails where it is told to."""

    def __init__(self, fails_at=None):
        self.told, self.fails_at = [], fails_at

    def _tell(self, what, *told):
        if what == self.fails_at:
            raise OSError("disk full")
        self.told.append((what, *told))

    def header(self, facts):
        self._tell("header", dict(facts))

    def step(self, step):
        self._tell("step", step)

    def event(self, event):
        self._tell("event", event)

    def sample(self, sample):
        self._tell("sample", sample)

    def close(self):
        self._tell("close")


def record(path, also):
    with Journal(path, also=also) as journal:
        journal.describe(rule="dynamic", parameters={"w": 4})
        journal.step(Step(0, 8.0, 8.0, amax=2.0))
        journal.sample(1, {"w": {"zero": 0.5, "exponents": {-3: 4}}})
        journal.event("note", 1, text="warming up")
        journal.step(Step(1, 8.0, 4.0, verdict=Verdict.SKIP))
        journal.describe(world_size=2)


def without_time(path):
    """The journal's lines, without the header: it holds the time."""
    return path.read_bytes().split(b"\n", 1)[1]


def test_a_sink_gets_every_line_in_order(tmp_path):
    sink = Recording()
    record(tmp_path / "run.jsonl", [sink])
    (what, facts), *rest = sink.told
    assert (what, facts["rule"], facts["parameters"]) == ("header", "dynamic", {"w": 4})
    assert {"schema", "time", "versions"} <= set(facts)
    assert rest == [
        ("step", Step(0, 8.0, 8.0, amax=2.0)),
        ("sample", Sample(1, {"w": {"zero": 0.5, "exponents": {-3: 4}}})),
        ("event", Event(1, "note", {"text": "warming up"})),
        ("step", Step(1, 8.0, 4.0, verdict=Verdict.SKIP)),
        ("event", Event(None, "note", {"world_size": 2})),
        ("close",),
    ]


def test_a_sink_gets_a_line_after_it_is_written(tmp_path):
    path = tmp_path / "run.jsonl"

    class Reader(Recording):
        def step(self, step):
            assert read_journal(path).steps[-1].step == step.step
            super().step(step)

    sink = Reader()
    record(path, [sink])
    assert [t[1].step for t in sink.told if t[0] == "step"] == [0, 1]


@pytest.mark.parametrize("fails_at", ["header", "step", "event", "sample", "close"])
def test_a_sink_that_fails_is_dropped_with_one_warning(fails_at, tmp_path):
    record(tmp_path / "alone.jsonl", [])
    bad, good = Recording(fails_at), Recording()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record(tmp_path / "run.jsonl", [bad, good])
    assert [(w.category, str(w.message)) for w in caught] == [
        (UserWarning, "Recording gets no more records of this run: OSError: disk full")
    ]
    assert without_time(tmp_path / "run.jsonl") == without_time(tmp_path / "alone.jsonl")
    assert len(good.told) == 7
    kinds = [t[0] for t in good.told]
    assert [t[0] for t in bad.told] == kinds[: kinds.index(fails_at)]


def test_a_journal_of_a_strict_process_has_the_line_all_the_same(tmp_path):
    """Under -W error the warning is raised, but not before the line is on disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        journal = Journal(tmp_path / "run.jsonl", also=[Recording("header")])
        with pytest.raises(UserWarning, match="disk full"):
            journal.step(Step(0, 8.0, 8.0))
        journal.step(Step(1, 8.0, 8.0))
        journal.close()
    assert [s.step for s in read_journal(tmp_path / "run.jsonl").steps] == [0, 1]


def test_closing_twice_closes_a_sink_once(tmp_path):
    sink = Recording()
    journal = Journal(tmp_path / "run.jsonl", also=[sink])
    journal.close()
    journal.close()
    assert sink.told == [("close",)]


def test_what_a_sink_does_with_nan_is_its_own_affair(tmp_path):
    sink = Recording()
    with Journal(tmp_path / "run.jsonl", also=[sink]) as journal:
        journal.step(Step(0, 8.0, 8.0, loss=math.inf))
    step = sink.told[1][1]
    assert step.loss == math.inf
    assert math.isnan(step.norm)

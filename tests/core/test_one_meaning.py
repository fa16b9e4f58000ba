"""One meaning of "skipped" and of headroom, wherever a run is shown."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from test_report import data_of

import gradlift.numpy
from gradlift import Cause, Journal, Verdict, read_journal, report
from gradlift.analysis.totals import totals
from gradlift.cli._status import Status
from gradlift.cli._view import Tail
from gradlift.cli.compare import compare
from gradlift.cli.doctor import doctor
from gradlift.cli.watch import watch
from gradlift.errors import TrainingHalted
from gradlift.integrations.chart_sink import ChartSink
from gradlift.journal import Run, Step
from gradlift.report.thinning import marks


class Charted(ChartSink):
    """A sink that keeps the numbers of the last step."""

    def _log(self, step, values):
        self.values = values


def charted(step):
    sink = Charted()
    sink.step(step)
    return sink.values


def gradient(value):
    return {"w": np.float32([value])}


@pytest.fixture
def recorded(tmp_path):
    """Two overflows, a NaN loss, a step without gradients, good steps, and a halt at the end."""
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    scaler = gradlift.numpy.Scaler("dynamic", max_consecutive_skips=1, journal=journal)
    weights, update = gradient(1.0), lambda w, g: None

    def step(loss, value):
        scaler.scale(loss)
        scaler.step(weights, {"w": None} if value is None else gradient(value), update)

    step(1.0, math.inf)
    step(1.0, 2.0)
    step(math.nan, math.nan)
    step(1.0, 2.0)
    step(1.0, None)
    step(1.0, 2.0)
    step(1.0, math.inf)
    with pytest.raises(TrainingHalted):
        step(1.0, math.inf)
    journal.close()
    return path, scaler


def test_every_count_of_skipped_steps_is_the_same(recorded):
    path, scaler = recorded
    run = read_journal(path)
    kinds = [(s.verdict, s.cause) for s in run.steps]
    assert kinds.count((Verdict.SKIP, Cause.OVERFLOW)) == 2
    assert kinds.count((Verdict.SKIP, Cause.LOSS_NONFINITE)) == 1
    assert kinds.count((Verdict.SKIP, Cause.NO_GRADIENTS)) == 1
    assert kinds.count((Verdict.HALT, Cause.OVERFLOW)) == 1
    tail = Tail(path)
    assert tail.look()
    sink, status = Charted(), Status(quiet=True)
    for s in run.steps:
        sink.step(s)
        status.step(s)
    in_text = next(
        line.split() for line in report.text(run).splitlines() if line.startswith("skipped ")
    )
    found = json.loads(CliRunner().invoke(doctor, [str(path), "--json"]).output)
    side = CliRunner().invoke(compare, [str(path), str(path)]).output
    counts = {
        "scaler": scaler.skipped_steps,
        "run": run.skipped,
        "totals": totals(run).skipped,
        "causes": sum(totals(run).causes.values()),
        "marks": sum(m.times for m in marks(run)),
        "json": report.as_json(run)["totals"]["skipped"],
        "text": int(in_text[1]),
        "page": sum(data_of(report.html(run))["marks"]["times"]),
        "watch": tail.view.frame(0.0).lanes[0].skipped,
        "watch's causes": sum(tail.view.frame(0.0).causes.values()),
        "TensorBoard": sink.values["gradlift/skipped"],
        "status": status.skipped,
        "doctor": found["skipped"],
        "doctor's events": len(found["events"]),
        "compare": int(
            next(x.split()[1] for x in side.splitlines() if x.split()[:1] == ["skipped"])
        ),
    }
    assert counts == dict.fromkeys(counts, 4)


def test_a_step_without_gradients_is_neither_applied_nor_skipped(recorded):
    added = totals(read_journal(recorded[0]))
    assert (added.steps, added.applied, added.without_gradients) == (8, 3, 1)
    assert "3 applied, 1 without gradients" in report.text(read_journal(recorded[0]))


OVERFLOWED = Step(0, 8.0, 4.0, amax=2.0, nonfinite=True, verdict=Verdict.SKIP, cause=Cause.OVERFLOW)


def test_an_overflowed_step_has_no_headroom(tmp_path):
    """Its amax is what was left over: 2.0 would be 15 bits."""
    assert math.isnan(OVERFLOWED.headroom())
    assert "gradlift/headroom_bits" not in charted(OVERFLOWED)
    run = Run(steps=[OVERFLOWED])
    assert math.isnan(totals(run).worst_headroom)
    with Journal(tmp_path / "run.jsonl") as journal:
        journal.step(OVERFLOWED)
    shown = CliRunner().invoke(watch, [str(tmp_path / "run.jsonl"), "--once"]).output
    assert "bits" not in shown
    status = Status(quiet=True)
    status.step(OVERFLOWED)
    assert "headroom" not in status.line(OVERFLOWED)


def test_headroom_is_that_of_the_largest_gradient_anywhere():
    """A gradient between modules that is larger than the parameters' is the one that overflows."""
    step = Step(0, 8.0, 8.0, amax=65504 / 2**9, probe_amax=65504 / 2**3)
    assert step.headroom() == 3.0
    assert charted(step)["gradlift/headroom_bits"] == 3.0
    assert totals(Run(steps=[step])).worst_headroom == 3.0
    status = Status(quiet=True)
    status.step(step)
    assert "headroom 3.0 bits" in status.line(step)

"""`gradlift run --stop-on broken` on scripts that would go on for ever."""

import pytest
from observe.running import SMALL, gradlift, recorded

from gradlift import Cause, Verdict, read_journal
from gradlift.journal import Event, Step
from gradlift.observe.stopping import LOST, LOST_WEIGHTS, Stopped, Stopper

# What training loops have around a step, and what a run that is ended must still do.
LOOP = """
import atexit
atexit.register(print, "atexit ran")
try:
    for i in range(10_000):
        try:
            one(i)
        except Exception as error:
            print("went on after", error)
finally:
    print("finally ran after", i + 1)
"""
LOSS = "def one(i):\n    step(float('nan') if i >= 7 else 1.0)\n"
WEIGHTS = """
def one(i):
    optimizer.zero_grad()
    target = torch.zeros(4, 1) if i != 5 else torch.full((4, 1), torch.inf)
    (model(torch.randn(4, 4)) - target).square().mean().backward()
    optimizer.step()
"""
FLOOR = """
def one(i):
    optimizer.zero_grad()
    out = model(torch.randn(4, 4))
    distance = (out - out).square().sum().sqrt() if i >= 3 else out.square().mean()
    scaler.scale(distance).backward()
    scaler.step(optimizer)
    scaler.update()
"""
LOST_AT = {
    "loss": (LOSS, 7 + LOST),
    "weights": (WEIGHTS, 5 + LOST_WEIGHTS),
    "floor": (FLOOR, 3 + LOST),
}


@pytest.mark.parametrize("what", LOST_AT)
def test_a_run_that_cannot_recover_is_ended(what, tmp_path):
    one, last = LOST_AT[what]
    (tmp_path / "train.py").write_text(SMALL + one + LOOP)
    done = gradlift("run", "-q", "--no-report", "--stop-on", "broken", "train.py", cwd=tmp_path)
    assert done.returncode == 1, done.err
    assert done.out.splitlines() == [f"finally ran after {last}", "atexit ran"]
    answer = done.err[done.err.index("gradlift has stopped this run") :]
    assert "steps in a row were lost" in answer
    assert "\nbroken " in answer
    assert "-> " in answer
    assert "Traceback" not in done.err
    run = read_journal(recorded(tmp_path))
    assert len(run.steps) == last
    assert run.events[-1].detail["how"] == "stopped"


def test_a_run_that_trains_is_not_ended(tmp_path):
    """Ten overflows at the start, one loss of NaN in five: it trains."""
    one = "scaler._init_scale = 2.0**40\ndef one(i):\n    step(float('nan') if i % 5 == 4 else 1)\n"
    (tmp_path / "train.py").write_text(SMALL + one + LOOP.replace("10_000", "120"))
    done = gradlift("run", "-q", "--no-report", "--stop-on", "broken", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert done.out.splitlines() == ["finally ran after 120", "atexit ran"]


def test_without_the_option_nothing_is_ended(tmp_path):
    (tmp_path / "train.py").write_text(SMALL + LOSS + LOOP.replace("10_000", "120"))
    done = gradlift("run", "-q", "--no-report", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert len(read_journal(recorded(tmp_path)).steps) == 120


def lost(i, **facts):
    return Step(i, 8.0, 4.0, nonfinite=True, verdict=Verdict.SKIP, cause=Cause.OVERFLOW, **facts)


def test_a_good_step_of_any_loss_begins_the_count_anew():
    stopper = Stopper()
    for i in range(3 * LOST):
        stopper.step(lost(i, key="g"))
        if i % 40 == 39:
            stopper.step(Step(i, 8.0, 8.0, key="d"))
    assert not stopper.stopped


def test_weights_that_are_not_finite_end_a_run_sooner():
    stopper = Stopper()
    stopper.event(Event(0, "note", {"code": "weights-nonfinite"}))
    with pytest.raises(Stopped, match=f"{LOST_WEIGHTS} steps in a row"):
        for i in range(LOST):
            stopper.step(lost(i))
    stopper.over = True
    stopper.step(lost(LOST))  # written after the script has ended


def test_it_goes_through_except_exception():
    assert not issubclass(Stopped, Exception)

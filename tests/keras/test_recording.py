"""Results, events and journals of a run; recording changes nothing."""

import math
import time

import keras
import numpy as np
import pytest
from helpers.keras import (
    BACKEND,
    HUGE,
    NAN,
    SGD,
    WAYS,
    bits,
    fit,
    lifted,
    line,
    weights,
)

from gradlift import Journal, Verdict, read_journal
from gradlift.errors import SettingsError, TrainingHalted
from gradlift.journal import Recorder, set_current
from gradlift.keras import LossScaleOptimizer, ScaleLogger


def test_a_rate_that_is_changed_meanwhile_is_journaled(tmp_path):
    def slower(epoch, rate):
        return rate / 2 if epoch else rate

    model = line(lifted(SGD(1.0)))
    callbacks = [
        keras.callbacks.LearningRateScheduler(slower),
        ScaleLogger(tmp_path / "run.jsonl", every=1),
    ]
    fit(model, 1, 1, epochs=3, callbacks=callbacks)
    assert weights(model) == [-(2 + 1 + 0.5)]
    rates = [s.lr for s in read_journal(tmp_path / "run.jsonl").steps]
    assert rates == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("how", [how for how in WAYS if "steps_per_execution" not in how], ids=str)
def test_every_step_is_concluded_once(how, tmp_path):
    """By `apply`, in Python, or by the logger; with two loggers and a run around them."""
    optimizer = lifted(max_consecutive_skips=1, on_floor="warn")
    model = line(optimizer, **how)
    with Journal(tmp_path / "around.jsonl") as around:
        set_current(Recorder(around))
        try:
            loggers = [ScaleLogger(tmp_path / f"{n}.jsonl", every=n) for n in (1, 5)]
            fit(model, 0.5, HUGE, 0.5, callbacks=loggers)
            with pytest.raises(TrainingHalted, match="2 steps in a row were skipped, since step 4"):
                fit(model, 0.5, HUGE, HUGE, callbacks=loggers)
        finally:
            set_current(None)
    for name in ("1", "5", "around"):
        run = read_journal(tmp_path / f"{name}.jsonl")
        assert [s.step for s in run.steps] == [0, 1, 2, 3, 4, 5], name
        events = [(e.what, e.step) for e in run.events if e.what not in ("resume", "note")]
        assert events == [("skip", 1), ("skip", 4), ("halt", 5)], name
        assert {s.key for s in run.steps} == {""}
        assert run.header["framework"] == "keras"
        assert run.header["parameters"] == {"line/w/kernel": 1}
    assert optimizer.result.verdict is Verdict.HALT


def test_a_fit_that_was_interrupted_leaves_nothing_behind(tmp_path):
    """Its last steps are recorded when it goes on; a new logger takes over from an old one."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    model = line(lifted())
    first = ScaleLogger(tmp_path / "first.jsonl", every=8)
    with pytest.raises(KeyboardInterrupt):
        fit(model, *[0.5] * 5, callbacks=[first, Stop()])
    done = model.optimizer.record.steps
    fit(model, 0.5, callbacks=[first])
    found = [s.step for s in read_journal(tmp_path / "first.jsonl").steps]
    assert found == list(range(done + 1))
    with pytest.raises(KeyboardInterrupt):
        fit(model, *[0.5] * 5, callbacks=[first, Stop()])
    before = len(read_journal(tmp_path / "first.jsonl").steps)
    fit(model, 0.5, 0.5, callbacks=[ScaleLogger(tmp_path / "second.jsonl")])
    assert len(read_journal(tmp_path / "first.jsonl").steps) == before
    assert len(read_journal(tmp_path / "second.jsonl").steps) == 2


# ScaleLogger
# (steps at once, batches between looks). Keras runs torch step by step.
LOOKS = [(1, None), (1, 7), (1, 64)] if BACKEND == "torch" else [(1, 7), (5, None), (5, 64)]


@pytest.mark.parametrize(("together", "every"), LOOKS)
def test_the_journal_is_complete(together, every, tmp_path):
    """However many steps run at once, and however seldom it is looked at."""
    rng = np.random.default_rng(0)
    rows = [HUGE if rng.random() < 0.1 else 0.5 for _ in range(83)]
    optimizer = lifted(SGD(2.0**-8))
    model = line(optimizer, steps_per_execution=together)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=every)
    told = fit(model, *rows, epochs=2, callbacks=[logger]).history
    run = read_journal(tmp_path / "run.jsonl")
    assert [s.step for s in run.steps] == list(range(166))
    assert [s.verdict is Verdict.APPLY for s in run.steps] == [x == 0.5 for x in 2 * rows]
    assert [s.next_scale for s in run.steps[:-1]] == [s.scale for s in run.steps[1:]]
    assert {s.norm for s in run.steps if s.verdict is Verdict.APPLY} == {0.5}
    assert {e.what for e in run.events} == {"skip"}
    assert len(run.events) == run.skipped == 2 * rows.count(HUGE)
    assert all(s.seconds > 0 for s in run.steps)
    assert told["skipped"] == [rows.count(HUGE)] * 2
    assert told["loss_scale"] == [run.steps[82].next_scale, run.steps[-1].next_scale]


@pytest.mark.parametrize("every", [None, 7])
def test_the_journal_has_every_step_that_a_checkpoint_has(every, tmp_path):
    """Else a run that is killed and resumed would lack the steps between the last look and it."""

    class Saver(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                self.model.save_weights(tmp_path / "model.weights.h5")
                had.append([s.step for s in read_journal(tmp_path / "run.jsonl").steps])

        def on_epoch_end(self, epoch, logs=None):
            self.model.save(tmp_path / "model.keras")
            had.append([s.step for s in read_journal(tmp_path / "run.jsonl").steps])

    had = []
    logger = ScaleLogger(tmp_path / "run.jsonl", every=every)
    fit(line(lifted()), *[0.5] * 8, callbacks=[Saver(), logger])
    assert had == [[*range(5)], [*range(8)]]
    assert [s.step for s in read_journal(tmp_path / "run.jsonl").steps] == [*range(8)]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras runs torch one step at a time")
def test_missing_steps_are_noted(tmp_path):
    model = line(lifted(), steps_per_execution=70)
    fit(model, *[0.5] * 70, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    run = read_journal(tmp_path / "run.jsonl")
    assert [s.step for s in run.steps] == list(range(6, 70))
    assert run.events[0].detail["text"].startswith("6 steps ran unseen")
    assert run.events[0].detail["code"] == "unseen"


def test_looking_changes_nothing(tmp_path):
    """Nothing but the record of steps, which holds amax too where a journal wants it."""
    ended = []
    for callbacks in ([], [ScaleLogger(tmp_path / "run.jsonl", every=1)], [ScaleLogger(every=3)]):
        optimizer = lifted(SGD(0.1, momentum=0.9))
        model = line(optimizer)
        fit(model, 1, 2, HUGE, 3, NAN, 4, epochs=2, callbacks=callbacks)
        held = [*model.variables, *optimizer.variables]
        ended.append(bits(v for v in held if v is not optimizer.ring))
    assert ended[0] == ended[1] == ended[2]


def test_the_progress_bar_shows_them(capsys):
    model = line(lifted(rule="dynamic:init_scale=2^9"))
    fit(model, 0.5, HUGE, 0.5, verbose=2, epochs=2, callbacks=[ScaleLogger()])
    lines = [text for text in capsys.readouterr().out.splitlines() if "loss" in text]
    assert len(lines) == 2
    for text, scale in zip(lines, ("256.0000", "128.0000")):
        assert "- loss: " in text
        assert f"loss_scale: {scale}" in text
        assert "skipped: 1" in text
        assert "grad_norm: 0.5000" in text


def test_the_progress_bar_shows_them_while_it_moves(capsys):
    model = line(lifted(rule="dynamic:init_scale=2^9"))
    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.06))
    fit(model, 0.5, HUGE, 0.5, 0.5, verbose=1, callbacks=[ScaleLogger(every=1), slow])
    *moving, last = capsys.readouterr().out.split("loss_scale: ")[1:]
    assert moving  # which of them were drawn is up to Keras, and to the clock
    assert all(text.startswith(("512.0000", "256.0000")) for text in moving)
    assert last.startswith("256.0000 - skipped: 1.0000 - grad_norm: 0.5000")


def test_every_epoch_has_all_numbers():
    """An epoch that only skipped has no norm of its own; a table wants a cell all the same."""
    model = line(lifted())
    told = [
        model.fit(np.float32([[x]]), np.float32([[0]]), verbose=0, callbacks=[logger]).history
        for logger in [ScaleLogger()]
        for x in (0.5, HUGE, 0.25)
    ]
    assert [h["grad_norm"] for h in told] == [[0.5], [0.5], [0.25]]
    assert [h["skipped"] for h in told] == [[0], [1], [0]]
    assert [h["loss_scale"] for h in told] == [[256], [128], [128]]


def test_two_fits_one_journal(tmp_path):
    """A second fit goes on: the file is continued, and steps are counted on."""
    path = tmp_path / "runs" / "k.jsonl"
    model = line(lifted())
    logger = ScaleLogger(journal=str(path))
    fit(model, 0.5, HUGE, callbacks=[logger])
    fit(model, 0.5, callbacks=[logger])
    run = read_journal(path)
    assert [s.step for s in run.steps] == [0, 1, 2]
    assert [e.what for e in run.events] == ["skip", "resume"]
    with Journal(tmp_path / "mine.jsonl") as mine:  # one's own is left open
        fit(model, 0.5, callbacks=[ScaleLogger(mine)])
        mine.event("note", text="still open")
    run = read_journal(tmp_path / "mine.jsonl")
    assert ([s.step for s in run.steps], len(run.events)) == ([3], 1)


def test_several_optimizers_have_no_one_rate(tmp_path):
    inner = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(1.0)))
    model = line(lifted(inner))
    fit(model, 0.5, HUGE, 0.5, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    assert weights(model) == [-1]
    assert [math.isnan(s.lr) for s in read_journal(tmp_path / "run.jsonl").steps] == [True] * 3


@pytest.mark.parametrize("every", [0, 65, 2.0, True])
def test_every_is_a_number_of_batches(every):
    with pytest.raises(SettingsError, match="from 1 to 64"):
        ScaleLogger(every=every)


def test_a_journal_shows_the_headroom_whatever_the_rule(tmp_path):
    """And records nothing else: weights are the same bits without it."""

    def trained(**logger):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer(SGD(0.01), rule="static:8"), "mse")
        x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[ScaleLogger(**logger)])
        return [w.tobytes() for w in model.get_weights()]

    path = tmp_path / "run.jsonl"
    assert trained(journal=path) == trained()
    steps = read_journal(path).steps
    assert len(steps) == 4
    assert all(0 < s.amax < np.inf for s in steps)

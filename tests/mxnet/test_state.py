"""States, in the trainer's file and apart; the journal."""

import json
import math
import pickle

import mxnet as mx
import numpy as np
import pytest
from helpers.mxnet import (
    ONE,
    TWO,
    losses,
    parameters,
    plain_step,
    run,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd

import gradlift.mxnet as gl
import gradlift.numpy
from gradlift import Cause, Journal, Verdict, read_journal, rules
from gradlift.errors import StateError, TrainingHalted
from gradlift.journal import Recorder, set_current

INF, NAN = math.inf, math.nan


def story(trainer, scaler, steps):
    for i in steps:
        step(gl, trainer, 0.3, INF if i in (3, 8) else 1.0)
    return weights(trainer), scaler.state_dict()


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("first", ["init_trainer", "load_states"])
def test_states_are_saved_with_the_trainers(tmp_path, first, devices):
    def make():
        return sgd(parameters(devices), update_on_kvstore=False, momentum=0.5)

    rule, file = "mxnet:growth_interval=2", str(tmp_path / "states")
    whole = make()
    expected = story(whole, gl.init_trainer(whole, rule), range(12))

    trainer = make()
    scaler = gl.init_trainer(trainer, rule)
    story(trainer, scaler, range(5))
    trainer.save_states(file)
    again = make()
    for p, q in zip(again._params, trainer._params, strict=True):
        p.set_data(q.data(devices[0]))
    if first == "load_states":
        again.load_states(file)
    resumed = gl.init_trainer(again, rule)
    if first == "init_trainer":
        again.load_states(file)
    assert resumed.state_dict() == scaler.state_dict()
    found, state = story(again, resumed, range(5, 12))
    assert same(found, expected[0])
    assert state == expected[1]
    assert state["gradlift"]["skipped"] == 2
    again.save_states(file)  # what was loaded can be saved
    with open(file, "rb") as saved:
        assert pickle.load(saved)[1]._gradlift == state


def test_mxnet_alone_reads_the_file(tmp_path):
    trainer = sgd(parameters())
    gl.init_trainer(trainer)
    step(gl, trainer)
    trainer.save_states(str(tmp_path / "states"))
    code = """
import sys; sys.modules["gradlift"] = None
import mxnet as mx
w, b = (mx.gluon.Parameter(n, shape=s) for n, s in (("w", 3), ("b", (2, 2))))
w.initialize(); b.initialize()
trainer = mx.gluon.Trainer([w, b], "sgd")
trainer.load_states(sys.argv[1])
print(trainer.learning_rate)
"""
    assert run(code, tmp_path / "states").strip() == "0.5"


def test_a_file_of_mxnets_own_is_loaded(tmp_path):
    plain = sgd(parameters(), learning_rate=0.125)
    plain_step(plain)
    plain.save_states(str(tmp_path / "states"))
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer)
    step(gl, trainer, spoil=INF)
    trainer.load_states(str(tmp_path / "states"))
    assert trainer.learning_rate == 0.125
    assert (scaler.steps, scaler.get_scale()) == (1, 2.0**16)
    step(gl, trainer)
    assert scaler.result.scale == 2.0**16
    assert scaler.get_scale() == 2.0**15


def test_a_state_of_another_rule_is_refused_before_anything_changes(tmp_path):
    trainer = sgd(parameters(), learning_rate=0.125)
    gl.init_trainer(trainer, "dynamic")
    step(gl, trainer)
    trainer.save_states(str(tmp_path / "states"))
    other = sgd(parameters())
    scaler = gl.init_trainer(other, "mxnet")
    with pytest.raises(StateError, match="saved with the rule 'backoff'"):
        other.load_states(str(tmp_path / "states"))
    assert (other.learning_rate, scaler.steps) == (0.5, 0)
    other = sgd(parameters())
    other.load_states(str(tmp_path / "states"))
    scaler = gl.init_trainer(other, "mxnet")  # in this order the new rule begins anew
    assert (other.learning_rate, scaler.steps) == (0.125, 0)


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_damaged_file_is_named(tmp_path, cut):
    file = tmp_path / "states"
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer)
    step(gl, trainer)
    trainer.save_states(str(file))
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(StateError, match="states cannot be read: it is damaged, or was not"):
        trainer.load_states(str(file))
    for other in (3, (1,)):
        file.write_bytes(pickle.dumps(other))
        with pytest.raises(StateError, match=r"or was not written by trainer.save_states"):
            trainer.load_states(str(file))
    step(gl, trainer)
    assert (scaler.steps, scaler.result.stepped) == (2, True)


def test_a_file_that_is_refused_leaves_the_trainer_as_it_was(tmp_path):
    file = tmp_path / "states"
    trainer = sgd(parameters(), learning_rate=0.125, momentum=0.5)
    scaler = gl.init_trainer(trainer, "dynamic")
    step(gl, trainer)
    momentum = {i: state.copy() for i, state in trainer._updaters[0].states.items()}
    for damage in (
        lambda saved: setattr(saved[1], "_gradlift", [1, 2]),
        lambda saved: saved[1]._gradlift.update(scale=10**5000),
        lambda saved: saved[0].update({1: mx.nd.array([[1, NAN], [1, 1]])}),
    ):
        trainer.save_states(str(file))
        saved = pickle.loads(file.read_bytes())
        saved[1].lr = 0.75
        saved[0][0][:] = 7
        damage(saved)
        file.write_bytes(pickle.dumps(saved))
        with pytest.raises(StateError):
            trainer.load_states(str(file))
        assert trainer.learning_rate == 0.125
        assert all(
            (found.asnumpy() == momentum[i].asnumpy()).all()
            for i, found in trainer._updaters[0].states.items()
        )
    type(trainer).load_states(trainer, str(file))  # as it is
    assert trainer.learning_rate == 0.75
    step(gl, trainer)
    assert (scaler.steps, scaler.result.stepped) == (2, True)


def test_states_of_no_step_and_states_alone(tmp_path):
    file = str(tmp_path / "states")
    trainer = sgd(parameters(TWO), momentum=0.5)
    scaler = gl.init_trainer(trainer)
    trainer.save_states(file)
    trainer.load_states(file)
    step(gl, trainer)
    with open(file, "wb") as saved:
        saved.write(trainer._updaters[0].get_states(dump_optimizer=False))
    trainer.load_states(file)
    step(gl, trainer)
    assert scaler.steps == 2


def test_a_state_that_is_refused_leaves_nothing_behind(tmp_path):
    """Else the next init_trainer() could not make SoftmaxOutput follow its scale."""
    code = """
import sys
import mxnet as mx
from mxnet.contrib import amp
import gradlift.mxnet as gl
import gradlift.numpy
from gradlift.errors import StateError, TrainingHalted
from gradlift.journal import Recorder, set_current
amp.init()
def make():
    w = mx.gluon.Parameter("w", shape=2); w.initialize()
    return mx.gluon.Trainer([w], "sgd", kvstore=None)
gl.init_trainer(make(), "static:2").trainer.save_states(sys.argv[1])
amp.amp._amp_loss_scale_initialized = False
trainer = make()
trainer.load_states(sys.argv[1])
trainer.optimizer._gradlift["gradlift"]["steps"] = -1
try:
    gl.init_trainer(trainer, "static:2")
except StateError as error:
    print(error)
gl.init_trainer(make(), "static:8")
print(amp.amp._loss_scaler.loss_scale)
"""
    assert (
        run(code, tmp_path / "states")
        == "steps and skipped are (-1, 0), expected two counts\n8.0\n"
    )


def test_state_dict_is_json_and_checked():
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    step(gl, trainer, spoil=INF)
    data = json.loads(json.dumps(scaler.state_dict()))
    other = gl.init_trainer(sgd(parameters()), "dynamic")
    other.load_state_dict(data)
    assert other.state_dict() == scaler.state_dict()
    for broken in (
        None,
        {},
        {**data, "gradlift": {**data["gradlift"], "steps": -1}},
        {**data, "scale": NAN},
    ):
        with pytest.raises(StateError):
            other.load_state_dict(broken)
    assert other.state_dict() == scaler.state_dict()


def test_a_state_of_another_adapter_is_loaded_and_back():
    """One layout for all: NumPy's scaler stands for the others."""
    trainer = sgd(parameters())
    scaler = gl.init_trainer(trainer, "dynamic")
    for spoil in (INF, 1, INF):
        step(gl, trainer, spoil=spoil)
    other = gradlift.numpy.Scaler("dynamic")
    other.load_state_dict(scaler.state_dict())
    assert (other.get_scale(), other.steps, other.skipped_steps) == (2.0**14, 3, 2)
    assert other.state_dict() == scaler.state_dict()
    again = gl.init_trainer(sgd(parameters()), "dynamic")
    again.load_state_dict(other.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_a_sharp_state_leaves_auto_cautious_since_nothing_retries():
    sharp = gradlift.numpy.Scaler("auto:sharp")
    scaler = gl.init_trainer(sgd(parameters()), "auto")
    scaler.load_state_dict(sharp.state_dict())
    assert scaler.rule == rules.parse("auto:cautious")


# The journal


def test_the_journal_tells_and_changes_nothing(tmp_path):
    finals = []
    for journal in (None, Journal(tmp_path / "run.jsonl")):
        trainer = sgd(parameters(), learning_rate=0.25)
        gl.init_trainer(trainer, "dynamic", journal=journal)
        gradient = np.concatenate([w.ravel() for w in weights(trainer)])
        for spoil in (1, INF, 1):
            step(gl, trainer, 1.0, spoil, batch_size=4)
        finals.append(weights(trainer))
    assert same(*finals)
    journal.close()
    run = read_journal(tmp_path / "run.jsonl")
    assert run.header["framework"] == "mxnet"
    assert run.header["rule"] == "backoff"
    assert run.header["parameters"] == {"w": 3, "b": 4}
    assert run.header["versions"]["mxnet"] == mx.__version__
    first, second, third = run.steps
    assert first.loss == pytest.approx((gradient**2).sum() / 2 / 4, rel=1e-6)
    assert first.norm == pytest.approx(np.linalg.norm(gradient) / 4, rel=1e-6)
    assert first.amax == np.abs(gradient).max() * 2.0**16
    assert (first.lr, first.scale, first.verdict) == (0.25, 2.0**16, Verdict.APPLY)
    assert (second.cause, second.nonfinite, second.culprits) == (Cause.OVERFLOW, True, ("b", "w"))
    assert (second.next_scale, third.scale) == (2.0**15, 2.0**15)
    (event,) = run.events
    assert (event.what, event.step, event.detail["culprits"]) == ("skip", 1, ["b (inf)", "w (inf)"])


def test_a_halt_and_a_note_are_recorded(tmp_path):
    trainer = sgd(parameters(TWO))
    gl.init_trainer(trainer, max_consecutive_skips=1, journal=tmp_path / "run.jsonl")
    step(gl, trainer, spoil=[INF, INF])
    with autograd.record():
        halves = [each.astype("float16") for each in losses(trainer._params, 1.0, INF)]
        with gl.scale_loss(halves, trainer) as scaled:
            autograd.backward(scaled)
    with pytest.raises(TrainingHalted):
        trainer.step(1)
    run = read_journal(tmp_path / "run.jsonl")
    assert [s.verdict for s in run.steps] == [Verdict.SKIP, Verdict.HALT]
    assert [(e.what, e.detail.get("code")) for e in run.events] == [
        ("skip", None),
        ("halt", None),
        ("note", "half-loss"),
    ]
    assert run.events[1].detail["culprits"] == ["b (inf)", "w (inf)"]


def test_a_run_that_is_recorded_around_it_gets_the_lines(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        set_current(Recorder(journal))
        try:
            trainer = sgd(parameters())
            gl.init_trainer(trainer)
        finally:
            set_current(None)
        step(gl, trainer)
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 1


def test_the_journal_of_a_run_that_is_off(tmp_path):
    trainer = sgd(parameters())
    with Journal(tmp_path / "run.jsonl") as journal:
        gl.init_trainer(trainer, "off", journal=journal)
        step(gl, trainer, batch_size=2)
        plain_step(trainer)
    first, second = read_journal(tmp_path / "run.jsonl").steps
    assert first.loss > 0
    assert first.scale == 1.0
    assert math.isnan(second.loss)


def test_a_schedule_that_cannot_be_asked_before_the_first_update(tmp_path):
    class Root(mx.lr_scheduler.LRScheduler):
        def __call__(self, updates):
            return self.base_lr * updates**-0.5

    trainer = mx.gluon.Trainer(parameters(), "sgd", {"lr_scheduler": Root(0.5)})
    with Journal(tmp_path / "run.jsonl") as journal:
        gl.init_trainer(trainer, "dynamic", journal=journal)
        for spoil in (INF, 1, 1):
            step(gl, trainer, spoil=spoil)
    rates = [step.lr for step in read_journal(tmp_path / "run.jsonl").steps]
    assert math.isnan(rates[0])
    assert rates[1:] == [0.5, 0.5 * 2**-0.5]

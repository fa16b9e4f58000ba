"""Several devices, several processes: whoever sees an overflow, all skip."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import PYTHONPATH
from helpers.mxnet import (
    TWO,
    backward,
    losses,
    parameters,
    plain_step,
    same,
    sgd,
    step,
    weights,
)
from mxnet import autograd, gluon, nd

import gradlift.mxnet as gl
from gradlift import Cause
from gradlift.errors import SettingsError

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("kvstore", ["device", "local", None])
@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_on_any_device_counts(kvstore, where):
    trainer = sgd(parameters(TWO), kvstore=kvstore)
    scaler = gl.init_trainer(trainer, "dynamic")
    before = weights(trainer)
    step(gl, trainer, spoil=[INF if i == where else 1.0 for i in range(2)])
    assert (scaler.result.cause, scaler.get_scale()) == (Cause.OVERFLOW, 2.0**15)
    assert same(weights(trainer), before)
    apart = (f"only on cpu({where})",)
    assert scaler.result.notes == (apart if kvstore is None else ())  # a sum has no place
    step(gl, trainer)
    assert scaler.result.stepped


def test_two_devices_train_as_without_a_scale():
    trainer, plain = sgd(parameters(TWO)), sgd(parameters(TWO), update_on_kvstore=False)
    scaler = gl.init_trainer(trainer, "dynamic:growth_interval=2")
    for _ in range(5):
        step(gl, trainer, 0.3, batch_size=2)
        plain_step(plain, 0.3, batch_size=2)
        assert same(weights(trainer), weights(plain))
    assert scaler.get_scale() == 2.0**18
    one, other = weights(trainer)[::2], weights(trainer)[1::2]
    assert same(one, other)


def test_the_norm_is_of_what_each_device_applies():
    gradient = np.concatenate([w.ravel() for w in weights(sgd(parameters()))])
    for kvstore, times in (("device", 2), (None, 1)):
        trainer = sgd(parameters(TWO), kvstore=kvstore)
        scaler = gl.init_trainer(trainer)
        step(gl, trainer)
        expected = times * np.linalg.norm(gradient)
        assert scaler.result.grad_norm == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_a_part_is_not_given():
    """Unscaled before the devices' gradients were added up: nobody has seen their sum."""
    trainer = sgd(parameters(TWO))
    scaler = gl.init_trainer(trainer)
    backward(trainer)
    gl.unscale(trainer)
    trainer.step(1)
    assert scaler.result.stepped
    assert math.isnan(scaler.result.grad_norm)


def test_updates_on_a_kvstore_are_refused():
    trainer = sgd(parameters(TWO), update_on_kvstore=True)
    with pytest.raises(SettingsError, match="update_on_kvstore=True applies gradients in the kv"):
        gl.init_trainer(trainer)
    with pytest.raises(SettingsError, match="or clip them"):
        gl.init_trainer(trainer, "off", max_norm=1.0)
    gl.init_trainer(trainer, "off")
    trainer = sgd(parameters(TWO))
    plain_step(trainer)  # MXNet's default: now it is settled
    with pytest.raises(SettingsError, match="make the trainer with update_on_kvstore=False"):
        gl.init_trainer(trainer)
    trainer = sgd(parameters(TWO), kvstore="dist_async")
    with pytest.raises(SettingsError, match="kvstore='dist_async' applies gradients as they ar"):
        gl.init_trainer(trainer)
    table = gluon.Parameter("table", shape=(4, 2), stype="row_sparse")
    table.initialize()
    trainer = sgd([table])
    with pytest.raises(SettingsError, match="row_sparse weights live in the kvstore"):
        gl.init_trainer(trainer)
    squeezed = {"type": "2bit", "threshold": 0.5}
    trainer = gluon.Trainer(parameters(TWO), "sgd", compression_params=squeezed)
    with pytest.raises(SettingsError, match="compression_params compare"):
        gl.init_trainer(trainer)


class Elsewhere(gluon.Trainer):
    """As Horovod's: gradients are added up with those of other processes."""

    def _allreduce_grads(self):
        pass


def test_what_one_process_saw_counts_once_it_is_reduced():
    for reduced, cause in ((False, Cause.NONE), (True, Cause.UNKNOWN_NONFINITE)):
        trainer = Elsewhere(parameters(), "sgd", kvstore=None)
        scaler = gl.init_trainer(trainer, "dynamic")
        backward(trainer, spoil=INF)
        if reduced:
            trainer.allreduce_grads()
        gl.unscale(trainer)
        for p in trainer._params:
            p.grad()[:] = nd.clip(p.grad(), -1, 1)  # nobody else can see it any more
        trainer.update(1) if reduced else trainer.step(1)
        assert scaler.result.cause is cause


def test_with_other_processes_a_non_finite_loss_is_one_of_many():
    """Their losses may be finite: all processes must come to the same decision."""
    trainer = Elsewhere(parameters(), "sgd", kvstore=None)
    scaler = gl.init_trainer(trainer, "dynamic")
    step(gl, trainer, x=NAN)
    assert scaler.result.cause is Cause.UNKNOWN_NONFINITE
    assert scaler.get_scale() == 2.0**15
    with autograd.record():
        given = [*losses(trainer._params, 1.0), nd.array([NAN])]
        with gl.scale_loss(given, trainer) as scaled:
            autograd.backward(scaled[:1])
    trainer.step(1)
    assert scaler.result.stepped


def start(role, port, *arguments):
    env = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_workers_stay_together():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = str(Path(__file__).with_name("worker_job.py"))
    others = [start(role, port, "-c", "import mxnet") for role in ("scheduler", "server")]
    workers = [start("worker", port, job, str(i)) for i in range(2)]
    try:
        done = [worker.communicate(timeout=180) for worker in workers]
    finally:
        for process in (*workers, *others):
            process.kill()
            process.communicate()
    one, two = (json.loads(out) for out, _ in done)
    assert one == two
    assert one["finite"]
    assert one["told"] == [
        ["NONE", 2.0**16],
        ["UNKNOWN_NONFINITE", 2.0**15],
        ["UNKNOWN_NONFINITE", 2.0**14],
        ["UNKNOWN_NONFINITE", 2.0**13],
        ["NONE", 2.0**13],
    ]

"""Logs that the engines themselves write here: real DeepSpeed, transformers, Lightning, Keras."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gradlift import Cause, diagnose
from gradlift.logs import read_log

HERE = Path(__file__).parent


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


# DeepSpeed


def deepspeed_job(log, stage, level):
    """ZeRO in float16, whose gradients are NaN from step 12 on."""
    job = [sys.executable, str(HERE / "deepspeed_job.py"), stage, "40", "12", level]
    environment = {**os.environ, "MASTER_PORT": port(), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        done = subprocess.run(
            job, stdout=out, stderr=out, env=environment, check=False, cwd=log.parent
        )
    assert done.returncode == (stage != "0")  # stage 0 goes on at its smallest scale


def test_a_deepspeed_run_that_died_at_the_smallest_scale(tmp_path):
    deepspeed_log = tmp_path / "train.log"
    deepspeed_job(deepspeed_log, "1", "INFO")
    run = read_log(deepspeed_log)
    lost = [s for s in run.steps if s.skipped]
    assert [s.step for s in lost] == list(range(12, 23))
    assert [s.scale for s in lost] == [2.0**e for e in range(10, -1, -1)]
    assert [s.cause for s in lost] == [Cause.UNKNOWN_NONFINITE] * 10 + [Cause.FLOOR]
    finding = diagnose(deepspeed_log)[0]
    assert (finding.severity, finding.kind, finding.steps[0]) == ("broken", "floor", 12)
    assert "since step 12" in finding.evidence
    assert "does not show whether the loss was finite" in finding.evidence
    assert "checkpoint from before step 12" in finding.advice
    assert len(diagnose(deepspeed_log)) == 1  # the exception is its consequence


@pytest.mark.parametrize("stage", ["0", "3"])
def test_the_other_stages_of_deepspeed(stage, tmp_path):
    """Stage 0 prints two lines about an overflow, and counts from 0."""
    deepspeed_job(tmp_path / "train.log", stage, "INFO")
    lost = [s for s in read_log(tmp_path / "train.log").steps if s.skipped]
    assert [s.step for s in lost][:11] == list(range(12, 23))
    assert [s.scale for s in lost][:11] == [2.0**e for e in range(10, -1, -1)]
    [finding] = diagnose(tmp_path / "train.log")
    assert (finding.severity, finding.kind, finding.steps[0]) == ("broken", "floor", 12)
    tables = read_log(tmp_path / "tables")  # its csv_monitor's, by samples
    assert [(s.step, s.lr) for s in tables.steps][:3] == [(4, 0.01), (8, 0.01), (12, 0.01)]
    assert tables.steps[-1].next_scale == 1.0
    assert [(f.kind, f.steps[0]) for f in diagnose(tables)] == [("scale-falls", 48)]


def test_a_deepspeed_run_that_printed_no_overflow(tmp_path):
    """As of 0.17.6, without a setting: only the exception is printed, and no step."""
    deepspeed_job(tmp_path / "train.log", "2", "WARNING")
    floor, hidden = diagnose(tmp_path / "train.log")
    assert (floor.severity, floor.kind, floor.steps) == ("broken", "floor", ())
    assert "does not show when they began" in floor.evidence
    assert (hidden.severity, hidden.kind) == ("hint", "overflows-hidden")
    assert '"log_level": "info"' in hidden.advice


SCALER = """
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.utils import logger

loss_scaler.dist.is_initialized, loss_scaler.dist.get_rank = lambda: True, lambda *_: 0
for each in (logger, *logger.handlers):
    each.setLevel("INFO")
scaler = loss_scaler.DynamicLossScaler(
    init_scale=16.0, scale_window=3, min_scale=1, delayed_shift=2,
    consecutive_hysteresis=False, raise_error_at_min_scale=True, dtype=torch.half,
)
for _ in range(7):
    scaler.update_scale(True)
"""


def test_deepspeeds_own_scaler_prints_what_is_read(tmp_path):
    """Hysteresis, the floor and the exception, by the class that prints them."""
    script = tmp_path / "scaler.py"
    script.write_text(SCALER)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    log = tmp_path / "run.log"
    log.write_text(done.stdout + done.stderr)
    run = read_log(log)
    assert [(s.scale, s.next_scale) for s in run.steps] == [
        (16.0, 16.0), (16.0, 8.0), (8.0, 4.0), (4.0, 2.0), (2.0, 1.0), (1.0, 1.0),
    ]  # fmt: skip
    assert run.header["hysteresis"] == 1
    assert run.steps[-1].cause is Cause.FLOOR


# transformers


def train(folder, bad_from, **more):
    """A real Trainer whose gradients are NaN from a batch on, and whose norm says so."""
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.calls = 0

        def forward(self, x, labels):
            self.calls += 1
            loss = (self.layer(x).squeeze(-1) - labels).square().mean()
            return {"loss": loss * (float("nan") if self.calls >= bad_from else 1.0)}

    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(64)]
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], max_steps=12, logging_steps=2,
        per_device_train_batch_size=4, save_steps=12, **more,
    )  # fmt: skip
    Trainer(Net(), arguments, train_dataset=data).train()


def test_transformers_console_and_state(tmp_path, capfd):
    train(tmp_path / "out", bad_from=7)
    captured = capfd.readouterr()
    log = tmp_path / "console.log"
    log.write_text(captured.out + captured.err)
    state = read_log(tmp_path / "out")
    console = read_log(log)
    assert state.header["formats"] == ["trainer_state"]
    assert [s.step for s in state.steps] == [2, 4, 6, 8, 10, 12]
    assert [s.verdict is None for s in state.steps] == [False] * 3 + [True] * 3
    assert [round(s.loss, 3) for s in console.steps] == [round(s.loss, 3) for s in state.steps]
    for run in (state, console):
        found = diagnose(run)[0]
        assert (found.severity, found.kind) == ("broken", "norm-nonfinite")
        assert "logging_nan_inf_filter" in found.evidence
    assert diagnose(state)[0].steps[0] == 8


def test_a_sound_trainer_run_has_no_finding(tmp_path, capfd):
    train(tmp_path / "out", bad_from=1000)
    assert diagnose(read_log(tmp_path / "out")) == []


# Tables


def test_lightnings_metrics(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    for step in (9, 19, 29):
        logger.log_metrics({"train_loss": 1.0 / step, "epoch": 0}, step=step)
        logger.log_metrics({"loss_scale": 1024.0, "skipped_steps": 0}, step=step)
    logger.save()
    run = read_log(tmp_path)
    assert run.header["formats"] == ["csv"]
    assert [(s.step, s.next_scale) for s in run.steps] == [(9, 1024.0), (19, 1024.0), (29, 1024.0)]
    assert run.steps[0].loss == pytest.approx(1 / 9)


def test_keras_csv_and_console(tmp_path):
    """In a process of its own, on a backend of its own."""
    script = tmp_path / "fit.py"
    script.write_text(
        "import keras, numpy as np\n"
        "keras.utils.set_random_seed(0)\n"
        "model = keras.Sequential([keras.layers.Dense(1)])\n"
        "model.compile('sgd', loss='mse')\n"
        "x = np.random.randn(64, 4).astype('float32')\n"
        "logger = keras.callbacks.CSVLogger('h.csv')\n"
        "data = x, x[:, :1]\n"
        "model.fit(*data, epochs=3, verbose=2, callbacks=[logger])\n"
        "model.evaluate(*data)\n"
        "model.fit(*data, epochs=2, validation_data=data)\n"
        "model.evaluate(*data)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )  # fmt: skip
    (tmp_path / "run.log").write_text(done.stdout, encoding="utf-8")
    console, table = read_log(tmp_path / "run.log"), read_log(tmp_path / "h.csv")
    assert console.header["formats"] == ["keras"]
    (tmp_path / "other.csv").write_text((tmp_path / "h.csv").read_text().replace(",", ";"))
    assert read_log(tmp_path / "other.csv").steps == table.steps
    assert [s.step for s in table.steps] == [0, 1, 2]
    assert [s.step for s in console.steps] == [1, 2, 3, 4, 5]  # with its progress bars
    losses = [s.loss for s in console.steps[:3]]
    assert losses == pytest.approx([s.loss for s in table.steps], abs=1e-4)


def test_tables_of_other_makers(tmp_path):
    wandb = tmp_path / "wandb.csv"
    wandb.write_text(
        '"Step","run-1 - train/loss","run-1 - train/loss__MIN","run-1 - train/grad_norm"\n'
        '"10","2.5","2.5","1.5"\n"20","NaN","NaN",""\n'
    )
    run = read_log(wandb)
    assert (run.steps[0].step, run.steps[0].norm) == (10, 1.5)
    assert run.steps[1].cause is Cause.LOSS_NONFINITE
    wandb.write_text('"train/global_step","run-1 - train/loss"\n"500","2.5"\n')  # transformers
    assert [(s.step, s.loss) for s in read_log(wandb).steps] == [(500, 2.5)]
    monitor = tmp_path / "Train_Samples_loss_scale.csv"
    monitor.write_text("step,loss_scale\n32,65536\n64,32768\n")
    assert [s.next_scale for s in read_log(monitor).steps] == [65536.0, 32768.0]
    wandb.unlink()
    (tmp_path / "Train_Samples_lr.csv").write_text("step,lr\n32,0.5\n64,0.25\n")  # a file a tag
    folder = read_log(tmp_path)
    assert [(s.step, s.next_scale, s.lr) for s in folder.steps] == [
        (32, 65536.0, 0.5),
        (64, 32768.0, 0.25),
    ]
    assert folder.events == []


# TensorBoard


def test_event_files_of_torch(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.add_scalar("train/loss", 2.0 / step if step < 5 else math.nan, step)
            writer.add_scalar("train/loss_scale", 1024.0, step)
            writer.add_scalar("train/accuracy", 0.5, step)
            writer.add_histogram("weights", np.arange(10), step)
    run = read_log(tmp_path)
    assert run.header["formats"] == ["tensorboard"]
    assert [s.loss for s in run.steps][:4] == [2.0, 1.0, pytest.approx(2 / 3), 0.5]
    assert run.steps[4].cause is Cause.LOSS_NONFINITE
    assert {s.next_scale for s in run.steps} == {1024.0}


TAGS = {
    "Megatron-LM": ["lm loss", "loss-scale", "grad-norm", "learning-rate"],
    "BigScience": ["lm-loss-training/lm loss", "loss-scale/loss-scale", "grad-norm/grad-norm"],
    "GPT-NeoX": ["train/lm_loss", "train/loss_scale", "", "train/learning_rate"],
    "DeepSpeed": ["Train/Samples/train_loss", "Train/Samples/loss_scale", "", "Train/Samples/lr"],
    "transformers": ["train/loss", "", "train/grad_norm", "train/learning_rate"],
    "Keras": ["epoch_loss", "", "", "epoch_learning_rate"],
    "torchtitan": ["loss_metrics/global_avg_loss", "", "grad_norm"],
    "composer": ["loss/train/total", "", "l2_norm/grad/global"],
    "fairseq": ["loss", "loss_scale", "gnorm", "lr"],
}
OTHERS = ["lm loss vs samples", "eval/loss", "evaluation_loss_vs_iterations", "val_loss"]


@pytest.mark.parametrize("trainer", TAGS)
def test_the_tags_of_each_trainer(trainer, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    values = {tag: v for tag, v in zip(TAGS[trainer], (2.5, 1024.0, 0.5, 0.125)) if tag}
    with SummaryWriter(tmp_path) as writer:
        for tag, value in values.items():
            writer.add_scalar(tag, value, 7)
        for tag in OTHERS:
            writer.add_scalar(tag, 99.0, 7000)
    [step] = read_log(tmp_path).steps
    numbers = (step.loss, step.next_scale, step.norm, step.lr)
    assert (step.step, [v for v in numbers if v == v]) == (7, list(values.values()))


def test_event_files_of_an_evaluation_are_left_out(tmp_path):
    """Keras and fairseq give validation the same names, in a folder beside; fairseq has the means
    of epochs in a third one."""
    from torch.utils.tensorboard import SummaryWriter

    folders = {"train_inner": (10, 20, 30), "train": (30,), "valid": (30,), "validation": (10, 20)}
    for folder, steps in folders.items():
        with SummaryWriter(tmp_path / folder) as writer:
            for step in steps:
                writer.add_scalar("loss", 2.5 if folder == "train_inner" else 9.5, step)
    run = read_log(tmp_path)
    assert [(s.step, s.loss) for s in run.steps] == [(10, 2.5), (20, 2.5), (30, 2.5)]
    assert run.events == []
    assert read_log(tmp_path / "valid").steps[0].loss == 9.5


def test_event_files_of_tensorflow(tmp_path):
    """TensorFlow writes a scalar as a tensor. A process of its own: torch is in this one."""
    script = (
        "import sys, tensorflow as tf\n"
        "with tf.summary.create_file_writer(sys.argv[1]).as_default():\n"
        "    for step in range(3):\n"
        "        tf.summary.scalar('epoch_loss', 1.0 + step, step=step)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
    assert [(s.step, s.loss) for s in read_log(tmp_path).steps] == [(0, 1.0), (1, 2.0), (2, 3.0)]

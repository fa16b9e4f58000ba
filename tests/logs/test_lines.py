"""What one line of each format comes to, and what lines say together."""

import math
from pathlib import Path

import pytest
from helpers.logs import bar, deepspeed, deepspeed_step, file, megatron, trainer

from gradlift import Cause, Verdict
from gradlift.errors import LogError
from gradlift.logs import FORMATS, read_log, read_run
from gradlift.logs.console import LINE_FORMATS

NAN, INF = math.nan, math.inf


def read(tmp_path, *lines, **options):
    return read_log(file(tmp_path / "run.log", lines), **options)


def brief(run):
    return [(s.step, s.scale, s.next_scale, s.skipped) for s in run.steps]


# One line. Each as its trainer writes it: format, line, what must be known of the step.

OVERFLOWS = [
    ("deepspeed", "[deepspeed] OVERFLOW! Skipping step. Attempted loss scale: 65536, reducing to "
     "32768.0", 65536, 32768),
    ("deepspeed", "[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 16777216.0, "
     "reducing to 8388608.0", 2**24, 2**23),
    ("deepspeed", "[deepspeed] fp16 dynamic loss scale overflow! Skipping step. Attempted loss "
     "scale: 65536, reducing to 32768.0", 65536, 32768),
    ("deepspeed", "[deepspeed] fp16 dynamic loss scale overflow! Rank 0 Skipping step. Attempted "
     "loss scale: 65536, reducing to 32768.0", 65536, 32768),
    ("deepspeed", "[2023-06-07 17:28:19,122] [INFO] [Rank 0] Overflow detected. Skipping step. "
     "Attempted loss scale: 4, reducing to 2", 4, 2),
    ("deepspeed", deepspeed(64, 32), 64, 32),
    ("deepspeed", "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 16, but "
     "hysteresis is 2. Reducing hysteresis to 1", 16, 16),
    ("deepspeed", "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, "
     "reducing to 65536", 65536, 65536),
    ("deepspeed", deepspeed(64, 32).replace("scale", "scal    e"), 64, 32),  # wrapped by a terminal
    ("colossalai", "Overflow occurs, the loss scale is adjusted to 32768.0", 65536, 32768),
    ("apex", "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
     65536, 32768),
    ("apex", "Gradient overflow.  Skipping step, reducing loss scale to 0.5", 1, 0.5),
    ("fairseq", "| WARNING: overflow detected, setting loss scale to: 0.0625", 0.125, 0.0625),
    ("fairseq", "2020-08-01 12:39:16 | INFO | fairseq.trainer | NOTE: overflow detected, setting "
     "loss scale to: 64.0", 128, 64),
    ("fairseq", "2023-01-18 06:21:13 | INFO | fairseq.trainer | NOTE: gradient overflow detected, "
     "ignoring gradient, setting loss scale to: 64.0", 128, 64),
    ("fairseq", "AMP: overflow detected, setting scale to to 64.0", 128, 64),
    ("fairseq2", "Overflow detected at step 12, ignoring gradient, decreasing loss scale from "
     "65536 to 32768.", 65536, 32768),
]  # fmt: skip


@pytest.mark.parametrize(("format", "line", "scale", "after"), OVERFLOWS, ids=str)
def test_an_overflow_is_a_skipped_step(format, line, scale, after, tmp_path):
    run = read(tmp_path, "INFO:starting", line, "something else: 3")
    assert run.header["formats"] == [format]
    [step] = run.steps
    assert (step.scale, step.next_scale, step.verdict) == (scale, after, Verdict.SKIP)
    assert step.cause is Cause.UNKNOWN_NONFINITE
    assert step.nonfinite


STEPS = [
    ("deepspeed", deepspeed_step(6, 0), {"step": 6, "lr": 0.01}),
    ("deepspeed", "rank:0 step=6, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]", {"step": 6}),
    ("deepspeed", "steps: 10 loss: 2.3021 iter time (s): 0.121 samples/sec: 264.463",
     {"step": 10, "loss": 2.3021}),
    ("megatron", megatron(122, 2.5, 4096.0, 0.231),
     {"step": 122, "loss": 2.5, "next_scale": 4096.0, "norm": 0.231, "lr": 1e-4}),
    ("megatron", " samples/sec: 51.222 | iteration      100/  320000 | elapsed time per iteration "
     "(ms): 624.7 | learning rate: 3.000E-05 | approx flops per GPU: 105.1TFLOPS | lm_loss: "
     "9.170946E+00 | loss scale: 32768.0 | number of skipped iterations:   0 | number of nan "
     "iterations:   0 |", {"step": 100, "loss": 9.170946, "lr": 3e-5, "next_scale": 32768.0}),
    ("megatron", " iteration      122/  250000 | elapsed time per iteration (ms): 86545.2 | "
     "learning rate 9.150E-06 | lm loss 2.504220E+00 | lm ppl: 1.2E+01 | loss scale 32768.0 |",
     {"step": 122, "loss": 2.50422, "lr": 9.15e-6, "next_scale": 32768.0}),
    ("megatron", " [2024-01-01 00:00:00.123456] iteration      122/  250000 | consumed tokens: 9 | "
     "elapsed time per iteration (s): 86.2 | lm loss: 2.5E+00 | loss scale: 1.0 | grad norm: 0.231 "
     "| num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | "
     "samples per second: 1.0 | TFLOPs: 100.1 |", {"step": 122, "loss": 2.5, "norm": 0.231}),
    ("fairseq", "2020-07-17 04:08:14 | INFO | train_inner | epoch 001:    100 / 2952087 "
     "loss=16.348, ppl=83437.5, wps=1, num_updates=100, lr=1e-06, gnorm=4.215, loss_scale=128, "
     "train_wall=22, wall=120",
     {"step": 100, "loss": 16.348, "norm": 4.215, "lr": 1e-6, "next_scale": 128.0}),
    ("fairseq", "| epoch 001:   3615 / 6547 loss=0.439, num_updates=3600, loss_scale=1399",
     {"step": 3600, "loss": 0.439}),
    ("fairseq", "| epoch 001:    100 / 2952087 loss=16.348, num_updates=7, loss_scale=0",
     {"step": 7, "loss": 16.348}),
    ("fairseq", 'slurm_procid 0 : 2022-01-01 | INFO | train_inner | {"epoch": 1, "update": 0.01, '
     '"loss": "15.878", "num_updates": "1", "lr": "2.8e-07", "gnorm": "16.981", "loss_scale": "4"}',
     {"step": 1, "loss": 15.878, "norm": 16.981, "next_scale": 4.0}),
    ("fairseq", "| epoch 001:  3%|#  | 81/887 [10:51<53:53,  2.09it/s, loss=5.7, wps=8.9e+19, "
     "num_updates=348, lr=0.0002, gnorm=0.5, clip=0, loss_scale=4, train_wall=47, wall=166952]",
     {"step": 348, "loss": 5.7, "norm": 0.5, "lr": 0.0002, "next_scale": 4.0}),
    ("fairseq", "2020-07-17 04:08:14 | INFO | train | epoch 002 | loss 9.803 | ppl 3.2 | "
     "num_updates 200 | lr 1e-06 | gnorm 55.005 | loss_scale 0 | wall 1",
     {"step": 200, "loss": 9.803, "norm": 55.005, "lr": 1e-6}),
    ("fairseq", "| epoch 002 | train loss 9.803 | nll_loss 8 | ppl 300 | num_updates 200 | lr "
     "0.1 | gnorm 1.2 | clip 0% | oom 0 | loss_scale 8.000 | wall 9",
     {"step": 200, "loss": 9.803, "norm": 1.2, "next_scale": 8.0}),
    ("fairseq", '2022-01-01 | INFO | train | {"epoch": 1, "train_loss": "9.8", '
     '"train_num_updates": "12", "train_gnorm": "1.5", "train_loss_scale": "4", "train_lr": "0.1"}',
     {"step": 12, "loss": 9.8, "norm": 1.5, "lr": 0.1, "next_scale": 4.0}),
    ("fairseq2", "Train Metrics (step 1,050) - CTC Loss: 540.044 | Gradient Norm: 1.5 | Learning "
     "Rate: 1e-05 | grad_scale: 0.0625",
     {"step": 1050, "loss": 540.044, "norm": 1.5, "lr": 1e-5, "next_scale": 0.0625}),
    ("transformers", "{'loss': 3.9, 'learning_rate': 5e-5, 'epoch': 0.1, 'step': 500}",
     {"step": 500, "loss": 3.9}),
    ("transformers", trainer("3.923", "1.5"), {"loss": 3.923, "norm": 1.5, "lr": 0.001}),
    ("transformers", trainer(3.923, 1.5, 5e-05, quoted=False), {"loss": 3.923, "lr": 5e-5}),
    ("transformers", "{'loss': 0.5, 'grad_norm': 2.0, 'learning_rate': 1e-4, 'epoch': 1.0, "
     "'loss_scale': 1024.0, 'skipped_steps': 0}", {"loss": 0.5, "next_scale": 1024.0}),
    ("nanogpt", "iter 2000: loss 1.7648, time 135.45ms, mfu 14.21%",
     {"step": 2000, "loss": 1.7648}),
    ("torchtitan", "[titan] 2026-01-01 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.01234  "
     "\x1b[33mgrad_norm:  1.2345  \x1b[36mmemory:  1.00GiB(2.00%)\x1b[0m",
     {"step": 10, "loss": 8.01234, "norm": 1.2345}),
    ("torchtitan", "[rank0]:2024-08-01 12:00:00,123 - root - INFO - \x1b[36mstep: 10  \x1b[32mloss:"
     "  7.1234  \x1b[33mmemory: 30.1GiB(32%)", {"step": 10, "loss": 7.1234}),
    ("keras", "10/10 - 1s - 100ms/step - loss: 0.1234", {"loss": 0.1234}),
    ("keras", "10/10 - 1s - loss: 0.1234 - acc: 0.5 - 1s/epoch - 10ms/step", {"loss": 0.1234}),
    ("keras", "10/10 - 1s - acc: 0.5 - loss: 0.1234", {"loss": 0.1234}),
    ("keras", "60000/60000 [=====] - 3s 50us/sample - loss: 0.1234 - acc: 0.9", {"loss": 0.1234}),
    ("keras", "10/10 \u2501\u2501\u2501 1s 9ms/step - acc: 0.5 - loss: 0.1234", {"loss": 0.1234}),
    ("keras", "20/20 - 0s - 2ms/step - grad_norm: 0.6592 - loss: 0.3 - loss_scale: 8192.0000 - "
     "skipped: 0.0000e+00", {"loss": 0.3, "next_scale": 8192.0, "norm": 0.6592}),
]  # fmt: skip


@pytest.mark.parametrize(("format", "line", "known"), STEPS, ids=str)
def test_a_line_of_numbers_is_an_applied_step(format, line, known, tmp_path):
    run = read(tmp_path, line)
    assert run.header["formats"] == [format]
    [step] = run.steps
    assert {name: getattr(step, name) for name in known} == known
    assert (step.verdict, step.cause) == (Verdict.APPLY, Cause.NONE)


def test_every_format_of_lines_is_tried_here():
    assert {row[0] for row in OVERFLOWS + STEPS} == {each.name for each in LINE_FORMATS}


@pytest.mark.parametrize("line", [
    "step 2000: train loss 1.7648, val loss 1.9016",
    "{'eval_loss': 1.2, 'eval_runtime': 3.0, 'epoch': 1.0}",
    "{'train_runtime': 12.0, 'train_loss': 2.0, 'epoch': 1.0}",
    "5/10 - 1s - 100ms/step - loss: 0.1234",
    "Epoch 10/10 - loss: 0.3",
    "validate step: 10  loss:  7.1234  memory: 30.1GiB(32%)",
    "2020-07-17 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 9.8 | num_updates 200",
    "Validation Metrics (step 50) - Loss: 540.044",
    "the loss is 3",
])  # fmt: skip
def test_what_is_no_step_is_none(line, tmp_path):
    with pytest.raises(LogError, match="no line is of a known format"):
        read(tmp_path, line)


# Lines together


def test_overflows_get_the_numbers_between_their_neighbours(tmp_path):
    run = read(
        tmp_path,
        deepspeed(16, 8),
        deepspeed(8, 4),
        deepspeed_step(5, 2),
        deepspeed_step(10, 2),
        deepspeed(4, 2),
        deepspeed(2, 1),
        deepspeed_step(15, 4),
        deepspeed(1, 1),
        deepspeed_step(20, 5),
    )
    assert brief(run) == [
        (1, 16.0, 8.0, True),
        (2, 8.0, 4.0, True),
        (5, 4.0, 4.0, False),
        (10, 4.0, 4.0, False),
        (14, 4.0, 2.0, True),
        (15, 2.0, 1.0, True),
        (16, 1.0, 1.0, True),
        (20, 1.0, 1.0, False),
    ]
    assert [str(s.cause) for s in run.steps if s.skipped][-1] == "floor"
    assert run.header["guessed"] == 4


def test_a_progress_bar_gives_an_overflow_its_number(tmp_path):
    """The message follows the bar without a line end."""
    run = read(
        tmp_path,
        "Map: 100%|##########| 1000/1000 [00:00<00:00, 8.5it/s]",
        bar(248) + deepspeed(2048, 1024),
        bar(249) + "\r" + bar(250),
        trainer(1.89, 0.5, quoted=False),
        bar(377) + deepspeed(1024, 512),
    )
    assert [s.step for s in run.steps] == [249, 250, 378]
    assert run.header["guessed"] == 0


@pytest.mark.parametrize("total", [100, 5000])
def test_the_bar_of_an_evaluation_is_left_out(total, tmp_path):
    lines = [bar(500, 1000), trainer("2.5", "1.0"), bar(10, total), bar(total, total)]
    lines += [bar(501, 1000) + deepspeed(16, 8), bar(510, 1000) + trainer("2.4", "1.0")]
    lines += [bar(total, total), bar(520, 1000) + trainer("2.3", "1.0")]
    assert [s.step for s in read(tmp_path, *lines).steps] == [500, 502, 510, 520]


def test_skips_that_are_only_counted(tmp_path):
    """Since DeepSpeed 0.17.6 an overflow prints nothing; the count shows it."""
    run = read(tmp_path, deepspeed_step(10, 0), deepspeed_step(20, 0), deepspeed_step(30, 3))
    assert [s.step for s in run.steps if s.skipped] == [28, 29, 30]
    late = read(tmp_path, deepspeed_step(5000, 12), deepspeed_step(5010, 12))
    assert late.skipped == 0
    assert "12 steps had been skipped before" in late.events[0].detail["text"]


def test_megatron_counts_skips_and_bad_losses_since_the_line_before(tmp_path):
    run = read(
        tmp_path,
        megatron(1, scale=2.0**31, skipped=1),
        megatron(2, scale=2.0**30, skipped=1),
        megatron(3, 11.0, 2.0**30, 2.0),
        megatron(103, 9.0, 2.0**29, 2.0, skipped=3, bad=1),
        megatron(104, scale=2.0**29, skipped=1, bad=1),
    )
    causes = [(s.step, s.cause) for s in run.steps if s.skipped]
    assert causes == [
        (1, Cause.UNKNOWN_NONFINITE),
        (2, Cause.UNKNOWN_NONFINITE),
        (100, Cause.UNKNOWN_NONFINITE),
        (101, Cause.UNKNOWN_NONFINITE),
        (102, Cause.LOSS_NONFINITE),
        (104, Cause.LOSS_NONFINITE),
    ]
    assert (run.steps[1].scale, run.steps[1].next_scale) == (2.0**31, 2.0**30)
    zero = read(tmp_path, megatron(1, 9.0, norm=1.0), megatron(2, 0.0, skipped=1))
    assert math.isnan(zero.steps[1].loss)  # printed if nothing was applied


def test_a_skip_for_a_large_norm_is_no_overflow(tmp_path):
    too_large = "skipping grad norm because it's too large 1234.5"
    lines = [megatron(1, 2.5, 1.0, 0.5), too_large, megatron(2, None, 1.0, 1234.5, skipped=1)]
    run = read(tmp_path, *lines, megatron(3, 2.5, 1.0, 0.5))
    assert [(s.step, s.skipped, s.verdict) for s in run.steps] == [
        (1, False, Verdict.APPLY), (2, False, None), (3, False, Verdict.APPLY),
    ]  # fmt: skip
    assert "1234.5, is above the trainer's limit" in run.events[0].detail["text"]
    run = read(tmp_path, lines[0], too_large, megatron(100, 2.5, 1.0, 0.5, skipped=3))
    assert run.skipped == 2


def test_colossalai_says_twice_that_a_step_was_skipped(tmp_path):
    moved, skipped = (
        "Overflow occurs, the loss scale is adjusted to {}",
        "Found overflow. Skip step",
    )
    first = [skipped, moved.format(32768.0), skipped]  # hysteresis let the first one pass
    run = read(tmp_path, *first, moved.format(16384.0), skipped, skipped)
    assert [s.next_scale for s in run.steps][1:] == [32768.0, 16384.0, 16384.0]


def test_epochs_of_keras(tmp_path):
    """`fit` prints the last line again after the validation, and `evaluate` one like it."""
    line = "3/3 \u2501\u2501\u2501\u2501 0s 9ms/step - loss: {}"
    fit = ["Epoch 1/2", line.format(0.5), line.format(0.5) + " - val_loss: 0.7", "Epoch 2/2"]
    run = read(tmp_path, *fit, line.format(0.4), line.format(0.9), *fit, line.format(0.2))
    assert [(s.step, s.loss) for s in run.steps] == [(1, 0.5), (2, 0.4), (3, 0.5), (4, 0.2)]


def test_other_ranks_are_left_out(tmp_path):
    ranks = [deepspeed(16, 8, rank) for rank in (1, 0, 3, 2)]
    assert brief(read(tmp_path, *ranks)) == [(1, 16.0, 8.0, True)]
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}"
    apex = [line.format(s) * 2 for s in (32768.0, 32768.0, 16384.0)]
    assert [s.next_scale for s in read(tmp_path, *apex).steps] == [32768.0, 16384.0]
    two = ["Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 32768.0"]
    assert {s.key for s in read(tmp_path, *apex, *two).steps} == {"", "1"}
    titan = "step: {}  loss:  8.0  grad_norm:  1.0  "
    late = [titan.format(n) for n in (1, 1, 2, 1, 2, 3)]
    assert [s.step for s in read(tmp_path, *late).steps] == [1, 2, 3]


def test_three_lines_of_one_overflow(tmp_path):
    """Stage 0 of DeepSpeed; growth is announced there, too."""
    run = read(
        tmp_path,
        "Grad overflow on iteration 0",
        "Reducing dynamic loss scale from 16 to 8.0",
        "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: 16, reducing to 8.0",
        "No Grad overflow for 1000 iterations",
        "Increasing dynamic loss scale from 8.0 to 16.0",
        deepspeed_step(1001, 1),
    )
    assert brief(run) == [(1, 16.0, 8.0, True), (1001, 16.0, 16.0, False)]


def test_a_message_that_a_terminal_cut_in_two(tmp_path):
    whole = deepspeed(2048, 1024)
    at = whole.index("scale: 2048") + 4
    run = read(tmp_path, whole[:at], "    " + whole[at:], deepspeed_step(10, 1))
    assert brief(run)[0] == (1, 2048.0, 1024.0, True)


def test_fairseq_counts_updates_and_not_overflows(tmp_path):
    note = "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {}"
    line = "epoch 001:    100 / 2952 loss=16.3, num_updates={}, lr=1e-06, gnorm=4.2, loss_scale=32"
    run = read(
        tmp_path,
        line.format(100),
        "overflow in param encoder.layers.0.fc1.weight",
        note.format(16.0),
        note.format(8.0),
        line.format(101).replace("=32", "=8"),
    )
    assert [(s.step, s.skipped) for s in run.steps] == [
        (100, False), (101, True), (101, True), (101, False),
    ]  # fmt: skip
    assert run.steps[1].culprits == ("encoder.layers.0.fc1.weight",)


def test_several_formats_in_one_file(tmp_path):
    run = read(tmp_path, deepspeed(16, 8), trainer("2.5", "inf"), deepspeed_step(1, 1))
    assert run.header["formats"] == ["deepspeed", "transformers"]
    [step] = run.steps
    assert (step.loss, step.lr, step.skipped) == (2.5, 0.001, True)


def test_a_number_that_is_not_finite_was_skipped_if_later_ones_are(tmp_path):
    lines = [trainer("2.5", "1.0"), trainer("2.4", "inf"), trainer("2.3", "1.0")]
    run = read(tmp_path, *lines, trainer("0.0", "nan"), trainer("0.0", "nan"))
    assert [s.verdict for s in run.steps] == [
        Verdict.APPLY, Verdict.SKIP, Verdict.APPLY, None, None,
    ]  # fmt: skip


def test_a_resume(tmp_path):
    lines = [f"iter {i}: loss 2.5, time 1.0ms" for i in (0, 10, 20, 30, 40)]
    again = [f"iter {i}: loss 2.5, time 1.0ms" for i in (20, 30)]
    run = read(tmp_path, *lines, *["start"] * 100, *again)
    assert [s.step for s in run.steps] == [0, 10, 20, 30, 40, 20, 30]
    assert [(e.what, e.step) for e in run.events] == [("resume", 20)]


def test_several_files_are_one_run(tmp_path):
    first = file(
        tmp_path / "a.log", [deepspeed_step(10, 0), deepspeed(16, 8), deepspeed_step(20, 1)]
    )
    second = file(tmp_path / "b.log", [deepspeed_step(15, 0), deepspeed_step(25, 0)])
    run = read_log([first, second])
    assert [s.step for s in run.steps] == [10, 20, 15, 25]
    assert [e.what for e in run.events if e.what != "skip"] == ["resume"]
    beside = file(tmp_path / "metrics.csv", ["step,loss", "10,2.5", "12,2.25"])
    run = read_log([first, beside])
    assert [(s.step, s.loss) for s in run.steps][:2] == [(10, 2.5), (12, 2.25)]


TRACE = [
    "Traceback (most recent call last):",
    '  File "/data/job/train.py", line 57, in <module>',
    "    loss = model(batch)",
    '  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call_impl',
    "    return forward_call(*args)",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
]


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "2: ", "[1,0]<stderr>:"])
def test_the_last_exception(prefix, tmp_path):
    launcher = [
        "Traceback (most recent call last):",
        '  File "/opt/torch/distributed/run.py", line 1, in main',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    run = read(tmp_path, deepspeed_step(5, 0), *(prefix + line for line in TRACE), *launcher)
    [end] = [e for e in run.events if e.what == "end"]
    assert end.detail["type"] == "RuntimeError"
    assert end.detail["message"].startswith("CUDA out of memory")
    assert end.detail["frames"] == [["train.py:57", "<module>", "loss = model(batch)"]]
    survived = read(tmp_path, *TRACE, deepspeed_step(5, 0), deepspeed_step(10, 0))
    assert [e for e in survived.events if e.what == "end"] == []


# What the user says


def test_a_pattern(tmp_path):
    line = "[e1] step {} | loss {} | gn 0.5 | s 1024"
    pattern = r"step (?P<step>\d+) \| loss (?P<loss>\S+) \| gn (?P<norm>\S+) \| s (?P<scale>\S+)"
    run = read(tmp_path, line.format(1, 2.5), line.format(2, "nan"), pattern=pattern)
    assert [(s.step, s.scale, s.norm) for s in run.steps] == [(1, 1024.0, 0.5), (2, 1024.0, 0.5)]
    assert run.steps[1].cause is Cause.LOSS_NONFINITE


@pytest.mark.parametrize("pattern", ["(", "loss", r"(?P<epoch>\d+)"])
def test_a_pattern_that_says_nothing_is_refused(pattern, tmp_path):
    with pytest.raises(LogError, match="--pattern"):
        read(tmp_path, "loss 3", pattern=pattern)


def test_a_format_that_the_user_names(tmp_path):
    lines = [deepspeed_step(5, 0), "iter 7: loss 2.5, time 1.0ms"]
    assert [s.step for s in read(tmp_path, *lines, format="nanogpt").steps] == [7]
    with pytest.raises(LogError, match="expected one of deepspeed"):
        read(tmp_path, *lines, format="nemo")


def test_what_is_no_log_is_refused_in_words(tmp_path):
    with pytest.raises(LogError, match="is not a gradlift journal, and no line is of a known"):
        read_run(file(tmp_path / "notes.txt", ["hello"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match=r"holds no journal.jsonl, no event files"):
        read_run(tmp_path / "empty")


def test_each_format_says_what_cannot_be_known():
    assert all(each.cannot and each.reads and each.versions for each in FORMATS)
    assert len({each.name for each in FORMATS}) == len(FORMATS)


def test_the_table_in_the_docs_is_that_of_the_formats():
    text = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()
    for each in FORMATS:
        cells = (each.name, each.versions, "; ".join(each.reads), "; ".join(each.cannot))
        assert f"| {' | '.join(cells)} |\n" in text

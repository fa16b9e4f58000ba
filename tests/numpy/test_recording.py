"""Results, events and journals of a run; recording changes nothing."""

import math

import numpy as np
from helpers.numpy import sgd, train

import gradlift.numpy as gl
from gradlift import Cause, Journal, read_journal, replay


def test_recording_changes_no_bit_and_the_run_replays(tmp_path):
    plain, _ = train()
    with Journal(tmp_path / "run.jsonl") as journal:
        recorded, scaler = train(journal)
    assert all((plain[n] == recorded[n]).all() for n in plain)
    run = read_journal(tmp_path / "run.jsonl")
    assert len(run.steps) == 60
    assert run.skipped == scaler.skipped_steps > 0
    again = replay(run, "auto:cautious")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]


def test_a_window_with_losses_of_inf_and_minus_inf_is_recorded(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = gl.Scaler("static:1", journal=journal)
        scaler.scale(math.inf)
        scaler.scale(-math.inf)
        result = scaler.step({"w": np.zeros(1)}, {"w": np.float32([np.nan])}, sgd)
    assert (result.cause, result.micro_batch) == (Cause.LOSS_NONFINITE, 0)
    assert math.isnan(read_journal(tmp_path / "run.jsonl").steps[0].loss)


def test_a_path_is_a_journal(tmp_path):
    train(tmp_path / "run.jsonl", steps=3)
    train(str(tmp_path / "run.jsonl"), steps=3)
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 6

"""The examples, run as a reader would run them: from anywhere, as scripts."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.torch import bits

from gradlift import Cause, read_journal

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN, LIFTED = EXAMPLES / "torch_gpt.py", EXAMPLES / "torch_gpt_gradlift.py"


def run(script, folder, *options):
    """What the script printed; it ran in an empty folder, without error or warning."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, options)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_plain_training_learns_and_resumes_to_the_bit(tmp_path):
    plan = ("--planned", 8)
    said = run(PLAIN, tmp_path, "--steps", 8, *plan, "--checkpoint", "whole.pt")
    before, after = map(float, re.search(r"loss (\S+) -> (\S+)", said).groups())
    assert after < before - 0.5

    run(PLAIN, tmp_path, "--steps", 4, *plan, "--checkpoint", "parts.pt")
    half_way = torch.load(tmp_path / "parts.pt")
    run(PLAIN, tmp_path, "--steps", 8, *plan, "--checkpoint", "parts.pt")
    whole, parts = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "parts.pt")
    assert half_way["step"] == 4
    assert bits(half_way["model"]) != bits(whole["model"])
    assert whole.keys() == {"model", "optimizer", "scheduler", "scaler", "rng", "step"}
    for part in whole:
        assert bits(whole[part]) == bits(parts[part]), part


def test_plain_training_in_float32(tmp_path):
    said = run(PLAIN, tmp_path, "--steps", 4, "--dtype", "float32", "--checkpoint", "run.pt")
    before, after = map(float, re.search(r"loss (\S+) -> (\S+)", said).groups())
    assert after < before
    assert torch.load(tmp_path / "run.pt")["scaler"] == {}  # disabled


def test_lifted_training_tells_what_happened(tmp_path):
    said = run(LIFTED, tmp_path, "--steps", 8, "--journal", "run.jsonl")
    rows = dict(re.findall(r"^ +([a-z][a-z -]*?) {2,}(\S.*?) {2,}", said, re.M))
    recorded = read_journal(tmp_path / "run.jsonl")
    assert len(recorded.steps) == 8
    assert recorded.steps[-1].loss < recorded.steps[0].loss
    assert int(rows["skipped steps"]) == recorded.skipped == 0
    assert recorded.steps[0].retries >= 2
    assert int(rows["batches recomputed"]) == sum(s.retries > 0 for s in recorded.steps)
    causes = Counter(str(Cause[e.detail["cause"]]) for e in recorded.events)
    assert rows["causes"] == ", ".join(f"{n} x {cause}" for cause, n in causes.items())
    assert set(causes) == {"overflow", "calibration"}  # down from 2^32, then up to what fits
    assert float(rows["held-out loss"]) < recorded.steps[0].loss
    assert 2.0 ** int(rows["final scale"][2:]) == recorded.steps[-1].next_scale
    assert "on purpose" in said
    assert re.search(r" 0 +applied, retried \d x +overflow +2\^32 -> 2\^\d+ +\w+\.", said)


def test_the_plain_example_is_plain():
    assert "gradlift" not in PLAIN.read_text().lower()


@pytest.mark.parametrize("script", [PLAIN, LIFTED], ids=lambda p: p.name)
def test_examples_are_short(script):
    assert len(script.read_text().splitlines()) < 150

"""Ranks that die and come back: torchrun's elastic agent, distributed checkpoints, other worlds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "elastic_job.py"
# By default torchrun gives all lives one store, in which gloo finds the addresses of the dead.
ENV = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(folder, *arguments, world=2, restarts=0):
    folder.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={world}", f"--max-restarts={restarts}"]
    done = subprocess.run(
        [*launch, str(JOB), str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENV,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return lines(folder / "told.jsonl")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, torchrun(folder, 14)


def test_a_rank_killed_in_mid_step_comes_back_and_nothing_shows(undisturbed, tmp_path):
    _, expected = undisturbed
    told = torchrun(tmp_path / "killed", 14, 10, restarts=1)
    lives = lines(tmp_path / "killed" / "lives.jsonl")
    assert [(life["life"], life["world"]) for life in lives] == [(0, 2), (1, 2)]
    assert [t["step"] for t in told] == [*range(10), *range(8, 14)]  # back to the checkpoint
    assert told[:10] == expected[:10]
    assert told[10:] == expected[8:]  # losses, norms, verdicts, scales and counts, to the bit
    causes = [t["cause"] for t in expected]
    assert causes.count("OVERFLOW") >= 2  # there was something to remember
    assert lives[1]["scale"] == expected[7]["scale"]
    assert lives[1]["gradlift"]["skipped"] == expected[7]["skipped"]


def test_a_checkpoint_of_two_ranks_is_continued_by_three(undisturbed):
    folder, expected = undisturbed
    told = torchrun(folder, 16, world=3)[len(expected) :]
    life = lines(folder / "lives.jsonl")[-1]
    assert life["world"] == 3
    assert life["scale"] == expected[11]["scale"]
    assert life["gradlift"]["steps"] == 12
    assert len(json.loads(life["gradlift"]["events"])) == expected[11]["skipped"]
    assert [t["step"] for t in told] == [12, 13, 14, 15]
    assert any(t["stepped"] for t in told)


def test_shards_of_two_ranks_are_continued_by_three(tmp_path):
    """The same, of FSDP2's shards and a rule with a memory."""
    told = torchrun(tmp_path, 9, "sharded")
    assert not told[0]["stepped"]
    saved = told[7]
    after = torchrun(tmp_path, 12, "sharded", world=3)[9:]
    first, second = lines(tmp_path / "lives.jsonl")
    assert (first["world"], second["world"]) == (2, 3)
    assert second["scale"] == saved["scale"] < 2**20
    assert second["gradlift"]["steps"] == 8
    assert second["gradlift"]["skipped"] == saved["skipped"] > 0
    assert [t["step"] for t in after] == [8, 9, 10, 11]
    assert after[0]["loss"] == told[8]["loss"]  # the same weights, to the bit
    assert all(t["stepped"] for t in after)

"""Two real processes over gloo: one rank's trouble must never let the ranks drift apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "rank_job.py"


def run(case, tmp_path, world=2):
    command = [sys.executable, str(JOB)]
    jobs = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "init"), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = []
    try:
        for job in jobs:
            out, error = job.communicate(timeout=120)
            assert job.returncode == 0, error
            told.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for job in jobs:
            job.kill()
    return told


def causes(told):
    return [row[1] for row in told["rows"]]


@pytest.mark.parametrize("trouble", ["nan", "inf"])
def test_with_a_process_group_everybody_agrees_on_everything(tmp_path, trouble):
    """No gradient is averaged here: only the agreement can have told rank 0."""
    a, b = run(f"group-{trouble}", tmp_path)
    assert a["rows"] == b["rows"]
    bad = "LOSS_NONFINITE" if trouble == "nan" else "OVERFLOW"
    assert [c for c in causes(a) if c != "NONE"] == [bad]
    assert causes(a)[2] == bad
    scale = 2.0**10 if trouble == "nan" else 2.0**9
    assert a["rows"][2][2] == scale


@pytest.mark.parametrize("trouble", ["nan", "inf"])
def test_ddp_without_a_group_treats_it_as_torch_does(tmp_path, trouble):
    """The average spreads the NaN; nobody trusts its own loss alone, so all lower the scale."""
    a, b = run(f"{trouble}-ddp", tmp_path)
    assert a["rows"] == b["rows"]
    assert a["weights"] == b["weights"]
    assert causes(a)[2] == "UNKNOWN_NONFINITE"
    assert a["rows"][2][2] == 2.0**9


def test_ddp_with_a_group_tells_a_dead_loss_from_an_overflow(tmp_path):
    a, b = run("group-nan-ddp", tmp_path)
    assert a["rows"] == b["rows"]
    assert a["weights"] == b["weights"]
    assert causes(a)[2] == "LOSS_NONFINITE"
    assert a["rows"][2][2] == 2.0**10


@pytest.mark.parametrize("case", ["group-retry-inf", "retry-inf-ddp"])
def test_a_retry_is_collective(tmp_path, case):
    a, b = run(case, tmp_path)
    assert a["rows"] == b["rows"]
    assert a["calls"] == b["calls"] == 8 + 3  # 2^10 -> 2^7
    assert a["rows"][2] == [True, "NONE", a["rows"][2][2], 3]


def test_a_world_of_one_trusts_its_loss(tmp_path):
    (only,) = run("group-nan", tmp_path, world=1)
    assert set(causes(only)) == {"NONE"}  # the trouble is rank 1's


def scales(told):
    return [row[2] for row in told["rows"]]


def test_what_one_rank_probes_is_known_to_all_of_a_group(tmp_path):
    """Only rank 1 looks inside its network; without that, both would choose a larger scale."""
    plain, _ = run("auto-group-quiet", tmp_path)
    (tmp_path / "init").unlink(missing_ok=True)
    a, b = run("auto-group-quiet-probe", tmp_path)
    assert a["rows"] == b["rows"]
    assert scales(a)[-1] < scales(plain)[-1]


def test_without_a_group_a_probe_on_one_rank_does_not_make_them_drift_apart(tmp_path):
    a, b = run("auto-quiet-probe-ddp", tmp_path)
    assert a["rows"] == b["rows"]


def test_auto_allows_for_the_averaging_of_gradients(tmp_path):
    a, b = run("auto-quiet-ddp", tmp_path)
    assert "replicas=2" in a["rule"]
    assert a["rows"] == b["rows"]

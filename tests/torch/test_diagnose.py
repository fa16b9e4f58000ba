"""Scripts with one fault each, and healthy ones, recorded as a user would and diagnosed.

The scripts know nothing of gradlift. The confusion matrix, script x finding, must be diagonal.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradlift.analysis.diagnosis import diagnose
from gradlift.analysis.findings import CHECKS
from gradlift.analysis.static_scale import find_scale

SCRIPTS = Path(__file__).parent.parent / "scripts"
# Weights leave their range only where somebody holds them there: tests/torch/test_masters.py.
KINDS = [check.__name__ for check in CHECKS if check.__name__ != "weight_range"]
HEALTHY = ["mlp", "transformer", "conv", "two_optimizers", "accumulation"]
AT_A_TIME = 2


def record(script, runs):
    """Runs a script under `gradlift run`; under torchrun if it is about ranks."""
    module = ["gradlift", "run", "--no-report", "-q", "--runs-dir", runs, "--every", "5"]
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "-m"] * (script.stem == "ranks")
    command = [sys.executable, "-m", *launch, *module, "--name", script.stem, script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, f"{script.name}: {done.stderr}"
    return runs / script.stem


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every script's run folder, by name."""
    folder = tmp_path_factory.mktemp("runs")
    scripts = [SCRIPTS / "faults" / f"{kind}.py" for kind in KINDS]
    scripts += [SCRIPTS / "healthy" / f"{name}.py" for name in HEALTHY]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        made = pool.map(lambda script: record(script, folder), scripts)
        return {script.stem: run for script, run in zip(scripts, made, strict=True)}


def matrix(found):
    width = max(map(len, found))
    lines = [f"{'':{width}}  " + " ".join(f"{kind[:4]:4}" for kind in KINDS)]
    for name, kinds in found.items():
        places = [str(kinds.index(kind) + 1) if kind in kinds else "." for kind in KINDS]
        lines.append(f"{name:{width}}  " + " ".join(f"{place:4}" for place in places))
    return "\n".join(line.rstrip() for line in lines)


def test_each_fault_is_found_and_nothing_else(runs, capsys):
    found = {
        name: [f.kind.replace("-", "_") for f in diagnose(folder)] for name, folder in runs.items()
    }
    with capsys.disabled():
        print(f"\n{matrix(found)}")
    assert found == {kind: [kind] for kind in KINDS} | {name: [] for name in HEALTHY}


def test_no_script_mentions_gradlift_and_none_is_left_out():
    faults = {path.stem for path in (SCRIPTS / "faults").glob("*.py")}
    healthy = {path.stem for path in (SCRIPTS / "healthy").glob("*.py")}
    assert (faults, healthy) == (set(KINDS), set(HEALTHY))
    for path in (*(SCRIPTS / "faults").glob("*.py"), *(SCRIPTS / "healthy").glob("*.py")):
        assert "gradlift" not in path.read_text()


def test_the_culprit_and_the_dead_layer_are_named(runs):
    assert diagnose(runs["culprit"])[0].parameters == ("gate.weight",)
    assert diagnose(runs["dead_layer"])[0].parameters == ("branch.weight", "branch.bias")
    assert set(diagnose(runs["underflow"])[0].parameters) == {
        f"auxiliary.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
    }


def test_the_scales_that_are_found(runs):
    """The one that is too low is raised; the range that is too wide fits no scale."""
    assert find_scale(runs["conservative"]).verdict == "static"
    assert find_scale(runs["conservative"]).scale >= 2.0**16
    assert find_scale(runs["underflow"]).verdict == "no single scale"
    assert find_scale(runs["conv"]).verdict in ("none", "static")
    assert find_scale(runs["mlp"]).scale == 2.0**11  # it unscales by hand: samples are taken before

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
from gradlift.analysis.static_scale import find_scale

SCRIPTS = Path(__file__).parent.parent / "scripts"
FAULTS = sorted(path.stem for path in (SCRIPTS / "faults").glob("*.py"))
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
    scripts = [SCRIPTS / "faults" / f"{name}.py" for name in FAULTS]
    scripts += [SCRIPTS / "healthy" / f"{name}.py" for name in HEALTHY]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        made = pool.map(lambda script: record(script, folder), scripts)
        return {script.stem: run for script, run in zip(scripts, made, strict=True)}


# A fault whose symptom has this name, and what is found to be its cause.
CAUSES = {
    "dead_layer": "dead_relu",
    "exploding": "diverging",
    "floor": "bad_operation",
    "forward_nan": "bad_data",
    "thrash": "growth_eager",
}


def test_each_fault_is_found_and_nothing_else(runs):
    found = {
        name: [f.kind.replace("-", "_") for f in diagnose(folder)] for name, folder in runs.items()
    }
    expected = {name: [CAUSES.get(name, name)] for name in FAULTS}
    assert found == expected | {name: [] for name in HEALTHY}


def test_no_script_mentions_gradlift():
    assert {path.stem for path in (SCRIPTS / "healthy").glob("*.py")} == set(HEALTHY)
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

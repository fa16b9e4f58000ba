"""gradlift.torch from outside: examples in docstrings and documents run, statistics are right."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conformance import documents

import gradlift.torch
from gradlift import formats
from gradlift.torch.scaler.statistics import describe

MODULES = [m.name for m in pkgutil.walk_packages(gradlift.torch.__path__, "gradlift.torch.")]


@pytest.mark.parametrize("name", ["gradlift.torch", *MODULES])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(("page", "code"), list(documents.snippets("python torch")))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_there_are_snippets():
    assert len(list(documents.snippets("python torch"))) >= 5


def test_a_step_is_short_enough_to_be_read():
    """So many calls, and so many changes of file, are promised; counted where nothing else runs."""
    script = documents.ROOT / "benchmarks" / "step_path.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    _, *rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["plain", "journal", "masters", "device"]
    for row in rows:
        calls, most_calls, changes, most_changes = map(int, row.split()[1:])
        assert 40 < calls <= most_calls, done.stdout
        assert 20 < changes <= most_changes, done.stdout


def test_statistics_against_numpy():
    format = formats.FP16
    rng = np.random.default_rng(0)
    g = (rng.standard_normal(5000) * 2.0 ** rng.uniform(-30, 16, 5000)).astype(np.float32)
    g[:500] = 0
    told = describe(torch.from_numpy(g))
    size = np.abs(g)
    assert told["elements"] == 5000
    assert told["zero"] == (size == 0).mean()
    held = (size >= 2.0**format.flushed_below) & (size < format.smallest_normal)
    assert told["subnormal"] == held.mean()
    assert told["near_max"] == (size > format.max / 8).mean()
    exponents, counts = np.unique(np.frexp(size[size > 0])[1] - 1, return_counts=True)
    assert told["exponents"] == dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def test_constructing_a_scaler_touches_no_device():
    scaler = gradlift.torch.GradScaler("cpu")
    assert not torch.cuda.is_initialized()
    assert scaler.get_scale() == 2.0**16


def test_the_import_is_light():
    """DTensor takes half as long to import as torch itself, and few have one."""
    code = "import sys, gradlift.torch; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_public_names():
    assert gradlift.torch.__all__ == [
        "GradScaler",
        "MasterWeights",
        "find_scale",
        "half_model",
        "layerwise",
        "probe",
    ]

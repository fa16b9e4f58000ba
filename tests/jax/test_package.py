"""gradlift.jax from outside: names, examples in docstrings and documents, imports, compile time."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import optax
import pytest
from conformance import documents

import gradlift.jax as gl
from gradlift import read_journal

MODULES = [m.name for m in pkgutil.walk_packages(gl.__path__, "gradlift.jax.")]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "jax_gpt.py"


@pytest.mark.parametrize("name", ["gradlift.jax", *MODULES])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(("page", "code"), list(documents.snippets("python jax")))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_there_are_snippets():
    assert len(list(documents.snippets("python jax"))) >= 8


NAMES = {
    "both routes": [
        "Scaler",
        "Result",
        "value_and_grad",
        "apply",
        "wrap",
        "WrapState",
        "scaled",
    ],
    "types": ["master", "MasterState", "Policy"],
    "watching": ["culprits", "log", "log_inside", "enforce"],
    "jmp": [
        *["get_policy", "half_dtype", "cast_to_half", "cast_to_full", "all_finite", "select_tree"],
        *["LossScale", "NoOpLossScale", "StaticLossScale", "DynamicLossScale"],
    ],
    "flax": ["DynamicScale"],
}
NAMES = [name for names in NAMES.values() for name in names]


def test_public_names():
    assert sorted(gl.__all__) == sorted(NAMES)
    public = {n for n, x in vars(gl).items() if n[0] != "_" and not isinstance(x, ModuleType)}
    assert public == set(NAMES)
    page = (ROOT / "docs" / "jax.md").read_text()
    for name in NAMES:
        assert re.search(rf"\b{name}\b", page), f"docs/jax.md does not know {name}"


def test_every_public_name_has_an_example():
    for name in NAMES:
        if name == "LossScale":  # a union of three that have
            continue
        assert ">>>" in (getattr(gl, name).__doc__ or ""), name


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_it_imports_no_other_framework():
    others = "torch", "keras", "tensorflow", "flax", "jmp", "equinox", "orbax", "rich"
    done = fresh(f"import sys, gradlift.jax; print([m for m in {others!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    done = fresh(
        f"import sys, flax, gradlift.jax; print([m for m in {others!r} if m in sys.modules])"
    )
    assert "flax" in done.stdout  # the test can fail
    done = fresh("import sys, gradlift; print('jax' in sys.modules)")
    assert done.stdout.strip() == "False"


def compile_seconds(leaves, step, *state):
    params = {f"p{i}": jnp.zeros((16, 16)) for i in range(leaves)}
    held = [make(params) for make in state]
    start = time.process_time()
    jax.jit(step).lower(params, *held, params).compile()
    return time.process_time() - start


def test_compile_time_is_linear_in_the_leaves():
    opt = optax.adamw(1e-3)
    tx = gl.wrap(opt, "dynamic", max_norm=1.0)

    def plain(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def wrapped(params, state, grads):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    compile_seconds(2, wrapped, tx.init)  # what is traced for the first time costs more
    few, many = (compile_seconds(n, wrapped, tx.init) for n in (50, 200))
    assert many < 4 * compile_seconds(200, plain, opt.init)
    assert many < 4 * few * 1.5  # a square would be 16


def test_500_leaves_compile():
    tx = gl.wrap(optax.adamw(1e-3), "dynamic:init_scale=4", max_norm=1.0)
    params = {f"p{i}": jnp.ones(4) for i in range(500)}
    step = jax.jit(lambda g, s, p: tx.update(g, s, p, value=1.0))
    updates, state = step(params, tx.init(params), params)
    assert bool(state.result.stepped)
    assert len(updates) == 500


def run_example(folder, *options):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, options)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return [float(x) for x in re.search(r"loss (\S+) -> (\S+)", done.stdout).groups()]


def test_the_example_trains_to_float32s_loss(tmp_path):
    before, after = run_example(tmp_path, "--steps", 15, "--journal", "run.jsonl")
    same, wanted = run_example(tmp_path, "--steps", 15, "--dtype", "float32")
    assert before == same
    assert after < before - 0.5
    assert abs(after - wanted) < 0.02
    run = read_journal(tmp_path / "run.jsonl")
    assert len(run.steps) == 15
    assert run.skipped == 0
    assert "jax" in run.header["versions"]
    assert len(EXAMPLE.read_text().splitlines()) < 120

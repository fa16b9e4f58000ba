"""gradlift.keras from outside: names, examples in docstrings and documents, imports, the example.

Everything runs on the backend of this run; what belongs to another one is left to its own run.
"""

import doctest
import importlib
import inspect
import os
import pkgutil
import random
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from conformance import documents

import gradlift.keras as gl
from gradlift import read_journal

BACKENDS = ("tensorflow", "jax", "torch")
BACKEND = keras.backend.backend()
OTHERS = [name for name in BACKENDS if name != BACKEND]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "keras_digits.py"
PAGE = ROOT / "docs" / "keras.md"


@pytest.fixture(autouse=True)
def same_start():
    """Documents set the dtype policy for everybody; other tests want it as it was."""
    policy = keras.config.dtype_policy()
    random.seed(0)  # what Keras' initializers start from; its set_random_seed imports TensorFlow
    np.random.seed(0)
    yield
    keras.config.set_dtype_policy(policy)


# names


def test_public_names():
    assert gl.__all__ == ["LossScaleOptimizer", "ScaleLogger"]
    public = {n for n, v in vars(gl).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(gl.__all__)


def test_every_public_name_has_an_example_and_is_in_the_page():
    for name in gl.__all__:
        assert ">>>" in getattr(gl, name).__doc__, name
        assert re.search(rf"\b{name}\b", PAGE.read_text()), f"docs/keras.md does not know {name}"


def public_members():
    """What the two classes add to Keras' own."""
    for thing, base in (
        (gl.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer),
        (gl.ScaleLogger, keras.callbacks.Callback),
    ):
        for name, value in vars(thing).items():
            told = callable(value) or isinstance(value, property)
            if told and not name.startswith("_") and not hasattr(base, name):
                yield name


def test_the_page_lists_what_an_optimizer_reports():
    members = set(public_members())
    assert {"result", "counts", "record", "enforce", "get_unscaled_gradients"} <= members
    page = PAGE.read_text()
    left_to_docstrings = {"dynamic_counter", "names"}
    missing = {n for n in members - left_to_docstrings if not re.search(rf"\b{n}\b", page)}
    assert missing == set()


def test_the_page_lists_every_setting():
    page = PAGE.read_text()
    for thing in (gl.LossScaleOptimizer, gl.ScaleLogger):
        settings = set(inspect.signature(thing.__init__).parameters) - {"self", "kwargs"}
        missing = {n for n in settings if not re.search(rf"\b{n}\b", page)}
        assert missing == set(), thing


# docstrings and documents


def modules():
    """gradlift.keras and its modules, but for those that need another backend."""
    yield "gradlift.keras"
    for module in pkgutil.walk_packages(gl.__path__, "gradlift.keras."):
        others = pytest.mark.skipif(
            module.name.split(".")[-1] in OTHERS, reason="of another backend"
        )
        yield pytest.param(module.name, marks=others)


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_is_a_module_for_each_backend():
    found = {m.name for m in pkgutil.iter_modules([str(Path(gl.__path__[0]) / "backends")])}
    assert set(BACKENDS) <= found


def snippets():
    yield from documents.snippets("python keras")
    yield from documents.snippets(f"python keras-{BACKEND}")


@pytest.mark.parametrize(("page", "code"), list(snippets()))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_there_are_snippets():
    assert len(list(documents.snippets("python keras"))) >= 5
    for backend in BACKENDS:
        assert list(documents.snippets(f"python keras-{backend}")), backend


def test_no_snippet_is_left_out():
    """A fence that is spelled in another way would never run."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    opened = {f for page in pages for f in re.findall(r"^```(.*keras.*)$", page.read_text(), re.M)}
    assert opened == {"python keras", *(f"python keras-{name}" for name in BACKENDS)}


# imports

HEAVY = (*BACKENDS, "optax", "flax", "plotly", "click")


def fresh(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def imported_by(statement):
    done = fresh(f"import sys\n{statement}\nprint('=', *(m for m in {HEAVY} if m in sys.modules))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("=")[2].split())


MAKE = "import keras, gradlift.keras; gradlift.keras.LossScaleOptimizer(keras.optimizers.SGD(0.1))"


def test_it_imports_nothing_that_keras_did_not():
    """Keras itself imports its backend, and jax on top wherever that is installed."""
    alone = imported_by("import keras")
    assert {BACKEND} <= alone <= {BACKEND, "jax"}
    assert imported_by("import gradlift.keras") == alone
    # The JAX backend shares gradlift.jax, which is made for optax.
    assert imported_by(MAKE) - alone == ({"optax"} if BACKEND == "jax" else set())


def test_that_guard_can_fail():
    assert "flax" in imported_by(f"import flax\n{MAKE}")


def test_it_works_where_no_other_backend_is_installed():
    absent = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {OTHERS} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
    train = """
import numpy as np
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
optimizer = gradlift.keras.LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="static:8")
model.compile(optimizer, loss="mse")
model.fit(x, x[:, :1], verbose=0, callbacks=[gradlift.keras.ScaleLogger()])
assert optimizer.result.stepped
"""
    done = fresh(f"{absent}{MAKE}{train}")
    assert done.returncode == 0, done.stderr
    done = fresh(f"{absent}import {OTHERS[0]}")
    assert "ModuleNotFoundError" in done.stderr  # it is absent


def test_another_backend_is_refused_by_name():
    done = fresh(MAKE, KERAS_BACKEND="numpy")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gradlift.errors.SettingsError: Keras runs on the backend 'numpy'; gradlift.keras knows "
        "tensorflow, jax and torch"
    )


@pytest.mark.skipif(BACKEND != "jax", reason="only the JAX backend needs more than Keras does")
def test_a_missing_package_is_named():
    done = fresh(f"import sys; sys.modules['optax'] = None\n{MAKE}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gradlift.errors.SettingsError: gradlift.keras on the jax backend needs optax: "
        "pip install 'gradlift[keras,jax]'"
    )


# the example


def run_example(folder, *options):
    """float16's and float32's held-out accuracy in %, the scale's exponent, and skips."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, options)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    said = re.search(
        r"accuracy: float16 (\S+)%, float32 (\S+)%\nscale 2\^(\d+), (\d+) steps skipped\n"
        r"the journal: gradlift report (\S+)\n$",
        done.stdout,
    )
    return *map(float, said.groups()[:4]), folder / said[5]


def test_the_example_reaches_float32s_accuracy(tmp_path):
    half, single, scale, skipped, journal = run_example(tmp_path, "--epochs", 5)
    assert single > 95
    assert abs(half - single) <= 1
    run = read_journal(journal)
    assert len(run.steps) == 5 * 43
    assert run.skipped == skipped
    assert run.steps[-1].next_scale == 2.0**scale
    assert run.header["backend"] == BACKEND
    assert len(run.header["parameters"]) == 8
    assert len(EXAMPLE.read_text().splitlines()) <= 120


def test_the_example_needs_its_scale_where_gradients_are_tiny(tmp_path):
    tiny = "--loss-weight", 1e-8, "--epochs", 2, "--journal", "run.jsonl"
    lifted, single, scale, _, _ = run_example(tmp_path, *tiny)
    lost, _, _, _, _ = run_example(tmp_path, *tiny, "--rule", "off")
    assert abs(lifted - single) <= 1
    assert scale > 30
    assert lost < single - 10

"""gradlift.mxnet from outside: names, examples in docstrings and documents, imports."""

import doctest
import importlib
import pkgutil
from inspect import ismodule
from pathlib import Path

import pytest
from conformance import documents
from helpers.mxnet import run

import gradlift.mxnet as gl

MODULES = [m.name for m in pkgutil.walk_packages(gl.__path__, "gradlift.mxnet.")]
NAMES = [
    "init_trainer",
    "scale_loss",
    "unscale",
    "init_loss_scaling",
    "LossScaler",
    "DynamicLossScaler",
]


@pytest.mark.parametrize("name", ["gradlift.mxnet", *MODULES])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(("page", "code"), list(documents.snippets("python mxnet")))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_there_are_snippets():
    assert len(list(documents.snippets("python mxnet"))) >= 3


def test_public_names():
    assert gl.__all__ == NAMES
    public = {n for n, v in vars(gl).items() if not n.startswith("_") and not ismodule(v)}
    assert public == set(NAMES)
    page = (Path(__file__).parents[2] / "docs" / "mxnet.md").read_text()
    for name in NAMES:
        assert ">>>" in getattr(gl, name).__doc__
        assert f"{name}(" in page


def test_importing_it_imports_no_other_framework():
    others = "torch", "jax", "keras", "tensorflow", "click", "rich"
    code = f"import sys, gradlift.mxnet; print([m for m in {others!r} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_a_numpy_that_mxnet_cannot_use_is_named():
    code = """
import numpy
del numpy.__deprecated_attrs__["bool"]  # as in 1.24
try:
    import gradlift.mxnet
except ImportError as error:
    print(error)
"""
    assert "MXNet 1.9.1 needs NumPy below 1.24" in run(code)

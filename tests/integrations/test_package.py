"""The trainers' integrations from outside: versions, sizes, examples, documents."""

import doctest
import importlib
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conformance import documents

from gradlift.errors import GradliftError

TRAINERS = {
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
}


def module(name):
    return importlib.import_module(f"gradlift.integrations.{name}")


@pytest.mark.parametrize("name", [*TRAINERS, "trainer_scaler", "versions"])
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "transformers":
        import deepspeed  # noqa: F401 - transformers does, and it prints something once
    failed, tried = doctest.testmod(module(name))
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("name", TRAINERS)
def test_public_names_have_a_docstring_with_an_example(name):
    for public in module(name).__all__:
        assert ">>>" in getattr(module(name), public).__doc__


@pytest.mark.parametrize("name", TRAINERS)
def test_an_integration_is_short(name):
    assert len(Path(module(name).__file__).read_text().splitlines()) < 150


@pytest.mark.parametrize(("page", "code"), list(documents.snippets("python integrations")))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_every_trainer_has_a_block():
    blocks = [param.values[1] for param in documents.snippets("python integrations")]
    for name in TRAINERS:
        assert sum(f"gradlift.integrations.{name} import" in code for code in blocks) == 1


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("found", ["0.9.1", "99.0.0rc1", None])
def test_another_version_is_one_clear_error(name, found, monkeypatch):
    package = TRAINERS[name]

    def version(asked):
        assert asked == package
        if found is None:
            raise metadata.PackageNotFoundError(asked)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, f"gradlift.integrations.{name}", raising=False)
    with pytest.raises(GradliftError, match=f"pip install '{package}>=") as error:
        module(name)
    said = str(error.value)
    assert "\n" not in said
    assert (f"found {package} {found}, but" if found else f"needs {package}") in said

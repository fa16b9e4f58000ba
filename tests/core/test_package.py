"""The package from outside: what it imports, what it exports, that its documents run."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conformance import documents

import gradlift

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "torch", "jax", "keras", "tensorflow", "mxnet", "click", "rich", "plotly")


def imported_by(statement):
    """Heavy modules in sys.modules after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


def test_import_gradlift_imports_no_framework():
    assert imported_by("import gradlift, gradlift.cli") == []


def test_the_guard_can_fail():
    assert imported_by("import gradlift, gradlift.numpy") == ["numpy"]


def test_works_in_a_bare_environment():
    """No site-packages at all: Python and gradlift's own source."""
    code = (
        "import gradlift\n"
        "rule = gradlift.rules.parse('auto')\n"
        "state = rule.advance(rule.init(), gradlift.Reading(False, 1.0))\n"
        "assert state.scale == 2.0**30, state\n"
    )
    env = {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-S", "-c", code], env=env, timeout=60, check=True)


def test_command_line_without_its_packages_says_what_to_install():
    env = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "gradlift"],
        env=env,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'gradlift[report]'" in done.stderr


@pytest.mark.parametrize("module", [gradlift, gradlift.rules], ids=lambda m: m.__name__)
def test_all_is_what_is_public(module):
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    names |= set(getattr(module, "_LAZY", ()))  # imported by whoever asks for them
    assert set(module.__all__) == names
    assert all(hasattr(module, name) for name in module.__all__)


def public_objects():
    for module in (gradlift, gradlift.rules, importlib.import_module("gradlift.numpy")):
        names = getattr(module, "__all__", None) or [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if callable(value) and not name.startswith("_"):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("thing", list(public_objects()))
def test_public_names_have_a_docstring_with_an_example(thing):
    assert thing.__doc__
    assert ">>>" in thing.__doc__ or thing.__name__ in ("Grads", "Update")


ELSEWHERE = {"torch", "jax", "keras", "mxnet", "__main__"}  # each in the folder of its framework
ELSEWHERE |= {"lightning", "fabric", "accelerate", "transformers", "trainer_scaler", "apex"}


def modules():
    for info in pkgutil.walk_packages(gradlift.__path__, "gradlift."):
        if not ELSEWHERE & set(info.name.split(".")):
            yield info.name


@pytest.mark.parametrize("name", ["gradlift", *modules()])
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize(("page", "code"), list(documents.snippets("python")))
def test_documents_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run(page, code)


def test_the_pages_have_snippets_at_all():
    assert len(list(documents.snippets("python"))) >= 2


def test_each_right_hand_side_of_coming_from_is_one_that_is_run():
    """By the folder whose framework it names; left-hand sides are text."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    sections = [s for s in page.split("\n## ")[1:] if not s.startswith("The peers' own tests\n")]
    assert len(sections) == 12
    run_by = "torch", "jax", "keras", "keras-tensorflow", "mxnet"
    for section in sections:
        before, after = re.findall(r"^```(\S.*)$", section, re.M)
        assert before == "text"
        assert after in [f"python {framework}" for framework in run_by]


def test_architecture_names_only_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:src|tests|benchmarks|docs|examples)/[\w/.]+)`", text)
    assert len(named) > 10
    assert [n for n in named if not (ROOT / n).exists()] == []


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_between_pages_have_a_target():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (page, path, anchor)
        for page in pages
        for path, anchor in re.findall(r"\]\(([^)#\s:]*)#?([\w-]*)\)", page.read_text())
    ]
    assert len(links) > 50
    for page, path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"

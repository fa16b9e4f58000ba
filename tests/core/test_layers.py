"""The shape of the package: imports run downwards, names occur once, records have one maker.

Each list of known violations must shrink: an entry that no longer occurs fails the test, too.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradlift"

LAYERS = [
    {"errors", "formats", "reading", "namespace", "text", "_version"},
    {"rules"},
    {"core"},
    {"journal", "logs"},
    {"numpy", "torch", "jax", "keras", "mxnet"},
    {"integrations", "apex"},
    {"observe", "selftest"},
    {"analysis"},
    {"report"},
    {"cli", "session", "__main__", ""},  # "" is gradlift/__init__
]
"""From the bottom to the top."""

WITHIN = ("errors", "journal", "cli")
"""Their layers are one: packages of the others do not import each other."""

BESIDE = {("keras", "torch"), ("keras", "jax")}
"""Keras runs on these, and checks gradients with their functions."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

RECORDS_MADE_IN = ("journal", "logs", "analysis.replay")
MOST_FILES = 15

THEIRS = {
    *("_version", "_values", "_parameters", "_apply"),  # torch's tensors and modules
    *("_get_scale_async", "_found_inf_per_device", "_check_inf_per_device"),  # torch's scalers
    *("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval"),  # the same
    *("_params", "_variables"),  # a Gluon trainer's, a Keras optimizer's
    *("_fields", "_replace"),  # every NamedTuple's
}
"""Private names of others, which we have to use."""

SAME_ON_PURPOSE = {
    "Scaler",  # the public name in each adapter that has one
    "MixedPrecision",  # Lightning's and Fabric's own name
}

# Known violations, each with what is to be done.

UPWARD: dict[tuple[str, str], str] = {}
CYCLES: dict[tuple[str, ...], str] = {}
PRIVATE: dict[tuple[str, str], str] = {}
CLASSES: dict[str, str] = {}
FOLDERS: dict[str, str] = {}
MAKERS: dict[str, str] = {}


def sources(root=SOURCE):
    """Every module of the package by its dotted name below it ("" is the package), parsed."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (ast.parse(path.read_text(encoding="utf-8")), path.name == "__init__.py")
    return found


class Imports(ast.NodeVisitor):
    """The imports of gradlift's own modules: (module, name or None, written at the module's top).

    Those inside functions count; those under `if TYPE_CHECKING:` do not.
    """

    def __init__(self, module, is_package, package):
        self.parts = module.split(".") if module else []
        self.is_package, self.package = is_package, package
        self.found, self.depth = [], 0

    def visit_If(self, node):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node):
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Import(self, node):
        for alias in node.names:
            first, _, rest = alias.name.partition(".")
            if first == self.package:
                self.found.append((rest, None, not self.depth))

    def visit_ImportFrom(self, node):
        if node.level:
            drop = node.level - self.is_package
            base = self.parts[: len(self.parts) - drop]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
        else:
            first, _, target = (node.module or "").partition(".")
            if first != self.package:
                return
        self.found += [(target, alias.name, not self.depth) for alias in node.names]


def imports(root=SOURCE):
    """(importer, imported module, name or None, at the top) of the whole package."""
    modules = sources(root)
    found = []
    for module, (tree, is_package) in modules.items():
        visitor = Imports(module, is_package, root.name)
        visitor.visit(tree)
        for target, name, top in visitor.found:
            inner = f"{target}.{name}" if target else str(name)
            if inner in modules:
                found.append((module, inner, None, top))
            else:
                found.append((module, target, name, top))
    return found


def package(module):
    return module.partition(".")[0]


def upward(found):
    """Imports of a higher layer, or of another package of the same layer."""
    within = {LEVEL[name] for name in WITHIN}
    bad = set()
    for importer, imported, *_ in found:
        here, there = package(importer), package(imported)
        if here == there:
            continue
        beside = LEVEL[here] == LEVEL[there] and LEVEL[here] not in within
        if LEVEL[there] > LEVEL[here] or (beside and (here, there) not in BESIDE):
            bad.add((importer, imported))
    return bad


def cycles(found):
    """Groups of modules that import each other at their top, straight or by way of others.

    A package's `__init__` that hands out its modules' names and is imported by them is one.
    """
    graph = defaultdict(set)
    for importer, imported, _, top in found:
        if top and importer != imported:
            graph[importer].add(imported)
    reached = {start: _reached(graph, start) for start in list(graph)}
    groups = {
        tuple(sorted(n for n in reached[m] if m in reached.get(n, ())))
        for m in reached
        if m in reached[m]
    }
    return groups


def _reached(graph, start):
    seen, waiting = set(), [start]
    while waiting:
        for after in graph.get(waiting.pop(), ()):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return seen


def private(found):
    """Private names, or modules, of another top-level package."""
    bad = set()
    for importer, imported, name, _ in found:
        if package(importer) != package(imported) and imported != "_version":
            parts = [*imported.split("."), *([name] if name else [])]
            if any(p.startswith("_") and not p.startswith("__") for p in parts):
                bad.add((importer, ".".join(parts)))
    return bad


def reached(modules):
    """Private attributes, not one's own, that only another top-level package defines."""
    defined = defaultdict(set)
    for module, (tree, _) in modules.items():
        defined[package(module)].update(_attributes(tree))
    bad = set()
    for module, (tree, _) in modules.items():
        here = package(module)
        others = set().union(*(names for p, names in defined.items() if p != here))
        foreign = others - defined[here] - THEIRS
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in foreign
            if attribute and getattr(node.value, "id", "") not in ("self", "cls"):
                bad.add((module, node.attr))
    return bad


def _attributes(tree):
    """Private names that are defined or assigned as attributes."""
    for node in ast.walk(tree):
        name = getattr(node, "name", "") if hasattr(node, "body") else getattr(node, "attr", "")
        stored = not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store)
        if isinstance(name, str) and name.startswith("_") and not name.startswith("__") and stored:
            yield name


def repeated_classes(modules):
    where = defaultdict(list)
    for module, (tree, _) in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(module)
    return {
        name: sorted(places)
        for name, places in where.items()
        if len(places) > 1 and name not in SAME_ON_PURPOSE
    }


def makers(modules):
    """Modules outside the journal that construct a Step or an Event of it."""
    bad = set()
    for module, (tree, _) in modules.items():
        if any(module == m or module.startswith(f"{m}.") for m in RECORDS_MADE_IN):
            continue
        for node in ast.walk(tree):
            called = getattr(node, "func", None)
            if isinstance(called, ast.Name) and called.id in ("Step", "Event"):
                bad.add(module)
    return bad


def full_folders(root=SOURCE):
    folders = [root, *(p for p in root.rglob("*") if p.is_dir())]
    counts = {str(f.relative_to(root)): len(list(f.glob("*.py"))) for f in folders}
    return {name: n for name, n in counts.items() if n > MOST_FILES}


def test_every_module_has_a_layer():
    assert {package(m) for m in sources()} <= set(LEVEL)


def test_imports_run_downwards():
    assert upward(imports()) == set(UPWARD)


def test_no_module_imports_itself_by_way_of_others():
    assert cycles(imports()) == set(CYCLES)


def test_no_package_reaches_into_another_ones_private_names():
    assert private(imports()) | reached(sources()) == set(PRIVATE)


def test_a_class_name_occurs_once():
    assert set(repeated_classes(sources())) == set(CLASSES)


def test_no_folder_is_too_full():
    assert set(full_folders()) == set(FOLDERS)


def test_records_are_made_in_one_place():
    assert makers(sources()) == set(MAKERS)


# The checks can fail


@pytest.fixture
def made(tmp_path):
    def make(**files):
        for name, text in files.items():
            path = tmp_path / "gradlift" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "gradlift"

    return make


def test_the_guard_sees_an_upward_import_wherever_it_is_written(made):
    lazy = "def f():\n    from ..torch import scaler\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..torch import scaler\n"
    root = made(
        core__a="from gradlift.report import page\n",
        core__b=lazy,
        core__c=typed,
        core__d="from ..rules import Rule\nimport math\n",
        core__e="import gradlift.cli\n",
        jax__a="from ..torch import scaler\n",
        torch__scaler="",
    )
    assert upward(imports(root)) == {
        ("core.a", "report"),
        ("core.b", "torch.scaler"),
        ("core.e", "cli"),
        ("jax.a", "torch.scaler"),
    }


def test_the_guard_sees_a_cycle(made):
    root = made(
        core__a="from .b import x\n",
        core__b="from . import c\n",
        core__c="from .a import y\n",
        core__d="def f():\n    from .e import z\n",
        core__e="from .d import f\n",
    )
    assert cycles(imports(root)) == {("core.a", "core.b", "core.c")}


def test_the_guard_sees_private_names_classes_makers_and_folders(made):
    root = made(
        core__a="from ..rules.base import _hidden\nclass Look: pass\n",
        rules__base="_hidden = 1\nclass Look: pass\n",
        jax__log="def f():\n    return Step(1, 2, 3)\n",
        journal__recorder="Step(1, 2, 3)\n",
        torch__scaler="class Scaler:\n    def __init__(self):\n        self._taken = 1\n",
        apex__amp="def f(scaler, self):\n    return scaler._taken, scaler._version, self._taken\n",
        **{f"mxnet__m{i}": "" for i in range(16)},
    )
    assert private(imports(root)) == {("core.a", "rules.base._hidden")}
    assert reached(sources(root)) == {("apex.amp", "_taken")}
    assert repeated_classes(sources(root)) == {"Look": ["core.a", "rules.base"]}
    assert makers(sources(root)) == {"jax.log"}
    assert full_folders(root) == {"mxnet": 16}

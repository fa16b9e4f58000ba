"""SECURITY.md: what gradlift executes, opens and sends, and what reaches a terminal."""

import ast
import math
import os
import warnings
from pathlib import Path

import pytest

from gradlift import Cause, Journal, Verdict, read_journal
from gradlift.core import Culprit, Note, StepResult
from gradlift.errors import MisuseError, StateError, add_note, warn
from gradlift.integrations.chart_sink import ChartSink, short_facts
from gradlift.journal import Event, Sample, Step
from gradlift.observe import folder
from gradlift.rules import parse

SOURCE = Path(__file__).parents[2] / "src" / "gradlift"
STEERING = "\x1b[31m\x1b]0;title\x07\x9b2J\r\u202e\u2066\ud800\x00"

# Modules that execute, listen or send, or load pickles; and calls that do.
MODULES = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code"),
    *("socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "asyncio"),
    *("subprocess", "multiprocessing", "pty", "requests", "webbrowser"),
}
CALLS = {"eval", "exec", "compile", "__import__", "run_module", "run_path"}
METHODS = {"system", "popen", "spawnv", "execv", "execve", "run_module", "run_path"}
LOADS = {"torch.load", "np.load", "numpy.load", "joblib.load"}
ALLOWED = {
    # `gradlift run`: the user's own script.
    ("observe/script.py", "exec"),
    ("observe/script.py", "compile"),
    ("observe/script.py", "run_module"),
    # Links within the page: `urlencode` writes text, and asks nobody.
    ("report/page/markup.py", "urllib.parse"),
}


def found(tree, name):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.module
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield node.func.id
            elif isinstance(node.func, ast.Attribute):
                whole = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and k.value.value is True for k in node.keywords)
                if whole in LOADS and not safe:
                    yield whole
                elif node.func.attr in METHODS:
                    yield node.func.attr


def test_nothing_in_the_package_unpickles_executes_listens_or_sends():
    seen = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        seen |= {(name, what) for what in found(ast.parse(path.read_text("utf-8")), name)}
    assert seen == ALLOWED


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "pickle"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("eval(text)", "eval"),
        ("os.system(text)", "system"),
    ],
)
def test_the_search_finds(line, what):
    assert [*found(ast.parse(line), "")] == [what]
    assert [*found(ast.parse("torch.load(path, weights_only=True)"), "")] == []


# Text on a terminal


def inert(text):
    return all(c.isprintable() or c in "\n" for c in text)


def test_errors_warnings_and_results_are_safe_to_print():
    assert inert(str(MisuseError(f"the parameter {STEERING}\nis bad")))
    with pytest.warns(UserWarning, match="the parameter") as seen:
        warn(f"the parameter {STEERING}")
    assert inert(str(seen[0].message))
    bad = StepResult(Verdict.SKIP, Cause.OVERFLOW, 8.0, culprits=(Culprit(STEERING, "nan"),))
    assert inert(str(bad))
    assert inert(str(StepResult(Verdict.APPLY, Cause.NONE, 8.0, notes=(Note("x", STEERING),))))
    error = ValueError()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        add_note(error, STEERING)
    assert all(map(inert, [*getattr(error, "__notes__", []), *(str(w.message) for w in seen)]))


def test_a_state_of_anything_is_refused_in_one_short_line():
    rule = parse("dynamic")
    for value in (10**5000, STEERING, "x" * 10**6, [[1] * 10**5], object(), {STEERING: 1}):
        for name in ("rule", "schema", "scale", "skips"):
            with pytest.raises(StateError) as seen:
                rule.load({**rule.dump(rule.init()), name: value})
            assert inert(str(seen.value))
            assert len(str(seen.value)) < 400


class Shown(ChartSink):
    def __init__(self):
        super().__init__()
        self.values = {}

    def _log(self, step, values):
        self.values.update(values)

    def _histogram(self, exponents, counts):
        return counts


def test_sinks_get_clean_tags():
    sink = Shown()
    sink.step(Step(0, 8.0, 8.0, loss=1.0, key=STEERING))
    sink.event(Event(0, STEERING, {"text": STEERING}))
    sink.sample(Sample(0, {STEERING: {"zero": 0.5, "exponents": {"1": 2}}}))
    assert len(sink.values) >= 5
    assert all(map(inert, sink.values))
    for tag in sink.values:
        tag.encode()
    facts = short_facts({"command": [STEERING], STEERING: {STEERING: STEERING}, "parameters": {}})
    assert inert(str(facts))


# Folders and files


def test_a_folder_has_a_plain_name_the_umask_and_is_nobody_elses(tmp_path):
    before = os.umask(0o077)
    try:
        made = folder.make("train", tmp_path / "runs", "mine", ["train.py"])
        page = made / "report.html"
        folder.write_file(page, "page")
        with Journal(made / "journal.jsonl") as journal:
            journal.step(Step(0, 8.0, 8.0))
    finally:
        os.umask(before)
    assert [made.stat().st_mode & 0o777, page.stat().st_mode & 0o777] == [0o700, 0o600]
    assert (made / "command.json").stat().st_mode & 0o777 == 0o600
    assert (made / "journal.jsonl").stat().st_mode & 0o777 == 0o600
    for name in ("../x", "../../x", "/x", "a/b", "..", "."):
        with pytest.raises(Exception, match="is no plain folder name"):
            folder.make("train", tmp_path / "runs", name, [])
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    assert folder.make("train", tmp_path / "runs", "link", []).name == "link-2"
    assert not any((tmp_path / "outside").iterdir())
    assert folder.make("train", tmp_path / "runs", "mine", []).name == "mine-2"


@pytest.mark.parametrize("kind", ["climbs", "a link", "names a link", "no text", "a pipe"])
def test_a_pointer_that_rank_0_did_not_write_is_not_followed(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_WAIT", 0.2)
    (tmp_path / "elsewhere").mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    pointer = folder.share(folder.make("train", runs, "mine", []), runs)
    assert folder.shared(runs) == runs / "mine"
    pointer.unlink()
    if kind == "climbs":
        pointer.write_text("../elsewhere")
    elif kind == "a link":
        (tmp_path / "name").write_text("mine")
        pointer.symlink_to(tmp_path / "name")
    elif kind == "names a link":
        (runs / "link").symlink_to(tmp_path / "elsewhere")
        pointer.write_text("link")
    elif kind == "no text":
        pointer.write_bytes(b"\xff\xfe\x00")
    else:
        os.mkfifo(pointer)
    found = folder.shared(runs)
    assert found is None


def test_the_pointer_of_an_earlier_launch_is_another(tmp_path, monkeypatch):
    """In a container the launcher has the same number each time."""
    monkeypatch.setattr(folder, "_WAIT", 0.2)
    folder.share(folder.make("train", tmp_path, "old", []), tmp_path)
    monkeypatch.setattr(folder, "_launched", lambda: "later")
    assert folder.shared(tmp_path) is None


def test_a_scale_of_zero_in_a_journal_is_no_scale(tmp_path):
    from gradlift import replay

    path = tmp_path / "run.jsonl"
    with Journal(path) as journal:
        for scale in (0.0, -1.0, math.inf, 8.0):
            journal.step(Step(0, scale, 8.0, amax=1.0))
    assert [step.verdict for step in replay(read_journal(path), "static:8").steps] == [
        *[None] * 3,
        Verdict.APPLY,
    ]

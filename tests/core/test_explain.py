"""The sections about kinds of findings: each kind has one, and each has the same parts."""

import ast
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradlift.analysis.findings as package
from gradlift.analysis.explain import explanation, kinds
from gradlift.cli._group import gradlift
from gradlift.errors import SettingsError

FINDINGS = sorted(Path(package.__file__).parent.glob("*.py"))
AT = package.Finding._fields.index("kind")
SECTIONS = [kind for chapter in kinds().values() for kind in chapter]
PARTS = ["What it means", "How it is seen", "What to do", "What it is confused with"]


def kinds_of(path):
    """Every kind that a check in this file can give, as far as its source shows; what cannot be
    read off the source is an error."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    tables = {
        t.id: n.value
        for n in tree.body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }

    def argument(call, at, name):
        named = [k.value for k in call.keywords if k.arg == name]
        return named[0] if named else call.args[at] if at < len(call.args) else None

    def values(node, around):
        if isinstance(node, ast.Constant):
            return {node.value}
        if isinstance(node, ast.IfExp):
            return values(node.body, around) | values(node.orelse, around)
        if isinstance(node, ast.Name):
            names = [a.arg for a in around.args.args]
            if node.id in names:  # a parameter: what the function is called with
                at = names.index(node.id)
                theirs = [c for c in calls if getattr(c.func, "id", "") == around.name]
                found = [values(argument(c, at, node.id), inside(c)) for c in theirs]
                return set().union(*found)
            for loop in ast.walk(around):  # for text, kind in TABLE
                if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple):
                    columns = [getattr(t, "id", "") for t in loop.target.elts]
                    if node.id in columns:
                        at, rows = columns.index(node.id), tables[loop.iter.id].elts
                        return set().union(*(values(row.elts[at], around) for row in rows))
        raise AssertionError(f"{path.name}:{node.lineno}: which kinds are these?")

    def inside(node):
        holding = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
        return max(holding, key=lambda f: f.lineno)

    found = set()
    for call in calls:
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name == "Finding":
            node = argument(call, AT, "kind")
            assert node is not None, f"{path.name}:{call.lineno}: a finding without a kind"
            found |= values(node, inside(call))
        elif name == "_replace":
            found |= {v.value for k in call.keywords if k.arg == "kind" for v in [k.value]}
    return found


def test_each_kind_has_a_section_and_each_section_a_kind():
    emitted = set().union(*map(kinds_of, FINDINGS))
    assert len(emitted) > 50
    assert emitted - set(SECTIONS) == set(), "add sections to analysis/explained"
    assert set(SECTIONS) - emitted == set(), "no check gives these kinds"
    assert len(SECTIONS) == len(set(SECTIONS))


def test_what_a_finding_explains_is_a_kind():
    named = {*package.EXPLAINS, *(k for folded in package.EXPLAINS.values() for k in folded)}
    assert named <= set(SECTIONS)


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_section_has_its_parts(kind):
    text = explanation(kind)
    first, *paragraphs = re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n")
    assert len(first) <= 100
    assert "\n" not in first
    assert first.endswith(".")
    leads = [re.match(r"\*\*(.*?)\.\*\* \S", p)[1] for p in paragraphs if p.strip()]
    assert leads == PARTS
    for name in re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", text):
        assert name in SECTIONS, f"{kind} names {name}"


@pytest.mark.parametrize("kind", [k for k in SECTIONS if "```" in explanation(k)])
def test_both_sides_of_an_example_are_python_and_differ(kind):
    blocks = re.findall(r"^```(\S*)\n(.*?)^```", explanation(kind), re.S | re.M)
    assert [language for language, _ in blocks] == ["diff"]
    lines = blocks[0][1].splitlines()
    assert {line[0] for line in lines} <= set(" +-")
    before, after = ("\n".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    assert before != after
    for side in (before, after):
        ast.parse(f"class _:\n  def _():\n    if 1:\n{indented(side)}")


def indented(code):
    own = min(len(line) - len(line.lstrip()) for line in code.splitlines() if line.strip())
    return "\n".join(f"{'':8}{line[own:]}" for line in code.splitlines())


def test_an_unknown_kind_is_named_with_the_nearest():
    with pytest.raises(SettingsError, match="'clip-scale': did you mean 'clip-scaled'"):
        explanation("clip-scale")
    with pytest.raises(SettingsError, match="lists all kinds"):
        explanation("qqqq")


def told(*words):
    return CliRunner().invoke(gradlift, ["explain", *words])


def test_explain_prints_the_section():
    done = told("bad-operation")
    assert done.exit_code == 0
    shown = " ".join(done.output.split())
    assert shown.startswith("bad-operation An operation was evaluated at a point")
    for part in PARTS:
        assert f"{part}." in shown
    assert "+distance = (delta.pow(2).sum(-1) + 1e-8).sqrt()" in shown
    assert "**" not in shown
    assert max(map(len, done.output.splitlines())) <= 100
    assert "\x1b" not in done.output


def test_explain_lists_every_kind_with_a_line_each():
    lines = told().output.splitlines()
    for chapter in kinds().values():
        for kind, sentence in chapter.items():
            assert (
                sum(line.split() == [kind, *sentence.replace("`", "").split()] for line in lines)
                == 1
            )


def test_explain_refuses_an_unknown_kind_in_one_line():
    done = told("clip\x1b[31m")
    assert done.exit_code == 2
    assert done.stderr.startswith("gradlift: no finding has the kind 'clip\\x1b[31m': ")
    assert done.stderr.count("\n") == 1

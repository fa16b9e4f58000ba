"""The command line, run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gradlift import Verdict
from gradlift.cli._group import gradlift as group
from gradlift.cli._status import Status
from gradlift.journal import Journal, Step

SCRIPT = Path(sys.executable).parent / "gradlift"
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def gradlift(*arguments, by=(str(SCRIPT),)):
    return subprocess.run([*by, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("by", [(str(SCRIPT),), (sys.executable, "-m", "gradlift")])
def test_help_and_version(by):
    assert "demo" in gradlift("--help", by=by).stdout
    assert gradlift("--version", by=by).stdout.startswith("gradlift, version")


def test_the_page_names_every_command_and_option_and_no_others():
    context = click.Context(group)
    names = group.list_commands(context)
    commands = [group, *(group.get_command(context, name) for name in names)]
    options = {"-h", "--help"} | {
        opt
        for command in commands
        for option in command.params
        if isinstance(option, click.Option)
        for opt in option.opts
    }
    inline = " ".join(re.findall(r"`([^`\n]+)`", PAGE.read_text()))
    rows = re.findall(r"^\| `gradlift ([\w-]+)", PAGE.read_text(), re.M)
    assert rows == names
    assert set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", inline)) - {"-m", "-9"} == options


def test_formats():
    out = gradlift("formats").stdout
    for part in ("FP16", "65504", "2^-14", "2^-24", "E4M3", "448", "BF16"):
        assert part in out


def test_demo_shows_that_unscaled_float16_dies_and_scaled_does_not():
    done = gradlift("demo", "--steps", "150")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  float")]
    loss = {" ".join(cells[:-5]): float(cells[-5]) for cells in rows}
    assert set(loss) == {
        "float32",
        "float16 unscaled",
        "float16 static:2^10",
        "float16 dynamic",
        "float16 auto",
    }
    assert loss["float16 unscaled"] > 0.3
    assert loss["float16 auto"] < 0.1
    assert loss["float32"] < 0.1
    assert loss["float16 dynamic"] < 0.1


def test_unknown_command_is_a_usage_error():
    done = gradlift("fly")
    assert done.returncode == 2
    assert "No such command" in done.stderr


LOOKING = [
    ["report"],
    ["report", "--text"],
    ["doctor"],
    ["find-scale"],
    ["replay", "--rule", "megatron"],
    ["watch", "--once"],
    ["compare"],
]


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "run" / "journal.jsonl") as written:
        written.describe(rule="dynamic", parameters={"w": 4})
        for i in range(20):
            written.step(Step(i, 1024.0, 1024.0, amax=1.0, loss=1.0, norm=0.5, seconds=0.1))
    return written.path


@pytest.mark.parametrize("words", LOOKING)
def test_every_command_that_looks_at_a_run(words, journal, tmp_path):
    for run in (journal, journal.parent):
        runs = [str(run)] * (2 if words == ["compare"] else 1)
        out = ["-o", str(tmp_path / "page.html")] if words == ["report"] else []
        done = gradlift(*words, *runs, *out)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout


@pytest.mark.parametrize("words", LOOKING)
def test_what_is_no_run_is_one_line_and_status_2(words, tmp_path):
    other, later = tmp_path / "notes.txt", tmp_path / "later.jsonl"
    other.write_text("shopping list\n")
    later.write_text('{"kind":"header","schema":99}\n')
    cases = {"nowhere": tmp_path / "nowhere", "not a gradlift journal": other, "later": later}
    for message, run in cases.items():
        runs = [str(run)] * (2 if words == ["compare"] else 1)
        done = gradlift(*words, *runs)
        assert done.returncode == 2, (message, done.stderr)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [w for w in LOOKING if w[0] != "watch"])
def test_a_run_that_was_cut_off_is_one_line_of_warning(words, journal, tmp_path):
    journal.write_bytes(journal.read_bytes()[:-9])
    runs = [str(journal)] * (2 if words == ["compare"] else 1)
    out = ["-o", str(tmp_path / "page.html")] if words == ["report"] else []
    done = gradlift(*words, *runs, *out)
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.splitlines()) == {
        f"gradlift: {journal}: 1 damaged or cut-off line left out, 19 steps read"
    }


def test_the_status_line_says_how_it_goes():
    status = Status(quiet=True)
    status.step(Step(0, 2.0**16, 2.0**15, verdict=Verdict.SKIP))
    status.step(Step(7, 2.0**15, 2.0**15, amax=2.0**12))
    last = Step(8, 2.0**15, 2.0**15, amax=2.0**10)
    status.step(last)
    line = "gradlift: step 8, scale 2^15, 1 skipped, headroom 4.0 bits at worst"
    assert status.line(last) == line

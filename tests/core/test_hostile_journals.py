"""Commands on damaged journals: a line of words and a status, never a traceback or an escape."""

import os
import random
import subprocess
import sys
import warnings

import hostile_journals
import large_journals
import pytest
from click.testing import CliRunner

import gradlift
from gradlift import read_journal
from gradlift.cli._group import gradlift as commands
from gradlift.errors import GradliftError, JournalError, JournalWarning
from gradlift.journal import Journal, Step

COMMANDS = [
    ["doctor"],
    ["doctor", "--json"],
    ["report", "--text"],
    ["report", "--json"],
    ["replay", "--rule", "megatron"],
    ["replay", "--rule", "auto", "--retries", "2"],
    ["find-scale"],
    ["find-scale", "--json"],
    ["watch", "--once"],
]
SLICE = 60  # of all values at all places, and as many changes of bytes
PAGES = 10  # of the slice: a page takes longer


def call(*words):
    with warnings.catch_warnings():
        return CliRunner().invoke(commands, [str(word) for word in words])


def check(done, what):
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(what) from done.exception
    assert done.exit_code in (0, 1, 2), what
    steering = [c for c in done.output if not c.isprintable() and c not in "\n\t"]
    assert not steering, f"{what}: {steering}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "run.jsonl"
    hostile_journals.write(path)
    return path.read_text().splitlines()


def test_a_slice_of_all_damaged_journals(sound, tmp_path):
    """`python tests/core/test_hostile_journals.py` tries all of them."""
    every = list(hostile_journals.cases(sound))
    assert len(every) > 3000
    tried(random.Random(0).sample(every, SLICE), tmp_path)


def test_a_slice_of_random_changes(sound, tmp_path):
    journal, source = "\n".join(sound) + "\n", random.Random(0)
    tried([hostile_journals.mutated(journal, source) for _ in range(SLICE)], tmp_path)


def tried(cases, folder, pages=PAGES):
    """Every command on every journal, and the calls that they stand for."""
    path, page, done = folder / "run.jsonl", folder / "page.html", 0
    for i, (name, journal) in enumerate(cases):
        path.write_bytes(journal if isinstance(journal, bytes) else journal.encode())
        others = [["compare", path], *([["report", "-o", page]] if i < pages else [])]
        for words in [*COMMANDS, *others]:
            check(call(*words, path), f"{words}: {name}")
            done += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run = read_journal(path)
                gradlift.replay(run, "auto")
                gradlift.diagnose(run)
            except GradliftError:
                pass
    return done


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("parameters", "body.weight", "exponents"), {"1000000000": 1}),
        (("parameters", "body.weight", "exponents"), {"2": -1}),
        (("parameters", "body.weight", "elements"), 10**400),
        (("parameters", "body.weight", "zero"), 2),
        (("parameters", "body.weight"), [1]),
        (("step",), -1),
    ],
)
def test_a_damaged_sample_is_left_out(sound, tmp_path, place, value):
    at = next(i for i, line in enumerate(sound) if '"sample"' in line)
    line = hostile_journals.replaced(sound[at], place, value)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*sound[:at], line, *sound[at + 1 :]]) + "\n")
    whole = tmp_path / "whole.jsonl"
    whole.write_text("\n".join(sound) + "\n")
    with pytest.warns(JournalWarning, match="1 damaged"):
        damaged = read_journal(path)
    assert damaged.samples == read_journal(whole).samples[1:]
    assert damaged.steps == read_journal(whole).steps


def test_thousands_of_keys_and_parameters_are_bounded(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = ['{"kind":"header","schema":1}']
    lines += [
        f'{{"kind":"step","step":0,"scale":8.0,"next_scale":8.0,"key":"k{i}"}}' for i in range(1200)
    ]
    names = ",".join(f'"w{i}":{{"elements":4,"exponents":{{"-3":4}}}}' for i in range(5000))
    lines.append(f'{{"kind":"sample","step":0,"parameters":{{{names}}}}}')
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(JournalWarning, match="200 damaged"):
        assert len(read_journal(path).by_key) == 1000
    page = tmp_path / "page.html"
    check(call("report", path, "-o", page), "report")
    assert "3,000 more are not shown; the JSON report has all" in page.read_text()


def test_names_of_files_do_not_steer_the_terminal(sound, tmp_path):
    folder = tmp_path / "run\x1b[31m"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("\n".join(sound) + "\n")
    for words in [*COMMANDS, ["report"]]:
        done = call(*words, folder)
        check(done, words[0])
        check(call(*words, folder / "nowhere\x1b[2J"), words[0])
    assert r"\x1b[31m" in call("report", "--text", folder).output
    check(call("compare", folder, folder), "compare")
    check(call("run", tmp_path / "nowhere\x1b[2J.py"), "run")


# Files that are no journals, and large ones


def test_files_of_other_kinds_are_refused_in_one_line(tmp_path):
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.mkdir()
    (loop / "journal.jsonl").symlink_to(loop / "journal.jsonl")
    (tmp_path / "folder" / "journal.jsonl").mkdir(parents=True)
    (tmp_path / "binary").write_bytes(random.Random(0).randbytes(10_000))
    others = [
        pipe,
        loop,
        tmp_path / "folder",
        tmp_path / "binary",
        tmp_path,
        "/dev/zero",
        "x" * 5000,
    ]
    for path in others:
        for words in COMMANDS:
            done = call(*words, path)
            assert (done.exit_code, done.exception.__class__) == (2, SystemExit), (words, path)
            assert done.output.startswith("gradlift: ")
            assert done.output.count("\n") == 1
    with pytest.raises(JournalError, match="null byte"):
        read_journal("a\0b")


MEASURED = """
import sys
from gradlift.cli._group import gradlift
try:
    gradlift(sys.argv[1:])
except SystemExit as end:
    status = open("/proc/self/status").read()  # ru_maxrss would count the test's own process
    print(status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
    sys.exit(end.code)
"""


@pytest.mark.parametrize("name", ["culprits_many_lines", "deep", "sample_exponents"])
def test_ten_megabytes_of_the_worst_cost_less_than_a_gigabyte(name, tmp_path):
    """`python tests/core/large_journals.py` measures all of them."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(large_journals.made(name))
    for words in (["doctor"], ["find-scale"]):
        command = [sys.executable, "-c", MEASURED, *words, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert int(done.stderr.splitlines()[-1]) < 2**20  # KiB


def test_a_scale_beyond_all_floats_is_not_recommended(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path) as journal:
        for low, high in ((-1100, -1000), (1000, 1100), (-1100, 1100)):
            counts = {str(low): 1, str(high): 1}
            journal.sample(0, {"w": {"elements": 2, "exponents": counts}})
            journal.step(Step(0, 8.0, 8.0))
            for words in (["find-scale"], ["find-scale", "--json"], ["doctor"]):
                check(call(*words, path), words)


# Links in a run's folder


def test_a_report_replaces_a_link_and_does_not_follow_it(sound, tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("\n".join(sound) + "\n")
    (folder / "report.html").symlink_to(kept)
    assert call("report", folder).exit_code == 0
    assert kept.read_text() == "mine"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(os.listdir(folder)) == ["journal.jsonl", "report.html"]


def test_a_journal_that_is_a_link_out_of_its_folder_is_refused(sound, tmp_path):
    outside = tmp_path / "outside.jsonl"
    outside.write_text("\n".join(sound) + "\n")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").symlink_to(outside)
    with pytest.raises(JournalError, match="leads out of its folder, and is not followed"):
        read_journal(folder)
    assert call("watch", "--once", folder).exit_code == 2
    assert read_journal(outside).steps
    (folder / "journal.jsonl").unlink()
    outside.rename(folder / "other.jsonl")
    (folder / "journal.jsonl").symlink_to(folder / "other.jsonl")
    assert read_journal(folder).steps


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    where, done = Path(tempfile.mkdtemp()), 0
    hostile_journals.write(where / "sound.jsonl")
    journal, source = (where / "sound.jsonl").read_text(), random.Random(1)
    all_cases = list(hostile_journals.cases(journal.splitlines()))
    all_cases += [hostile_journals.mutated(journal, source) for _ in range(4000)]
    for start in range(0, len(all_cases), 100):
        done += tried(all_cases[start : start + 100], where)
        tried_now = min(start + 100, len(all_cases))
        print(f"{tried_now} of {len(all_cases)} journals, {done} commands", flush=True)

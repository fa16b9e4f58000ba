"""Scripts with one fault each, their cures, and healthy ones: what the doctor says about each.

The scripts were written without knowledge of the doctor, and none mentions gradlift. `make test`
runs a slice of them; `make test-doctor` runs all, and prints the matrix.
"""

import os
import re
from collections import Counter

import pytest
from doctor.recording import findings, output, record_all, scripts_of

from gradlift.analysis.findings import CHECKS
from gradlift.journal import read_journal

ALL = os.environ.get("DOCTOR") == "all"
EVERY = 1 if ALL else 12

# What names a fault as well as its folder does: the cause and the cure are the same.
ALSO = {
    "adapters-zero": {"zero-init"},
    "tower-detached": {"detached-layer"},
    "start-high": {"start"},
    "start-low": {"conservative"},
    "scale-thrash": {"thrash"},
    "scale-floor": {"floor", "bad-operation"},
    "ranks-disagree": {"ranks"},
    "fp16-parameters": {"updates-lost"},
}
# What a tired person must not be told about a fault: it hides it, or costs a day.
SCALE, LIST = r'[Rr]aise the scale|init_scale|lower scale|rule="auto', r"a log or a division"
WRONG = {
    "zero-grad-misplaced": SCALE,
    "accumulation-not-divided": SCALE,
    "resume-without-scaler": SCALE,
    "clip-scaled": SCALE,
    "step-beside-scaler": SCALE,
    "bad-operation": SCALE,
    "one-sample-norm": SCALE + "|in float32",
    "scale-floor": SCALE + "|in float32",
    "diverging": SCALE + "|in float32",
    "weights-nonfinite": SCALE + "|division",
}
# What the doctor does not name yet. A script that leaves this list by itself fails the test.
NOT_YET: set[str] = set()


def chosen(*groups):
    return scripts_of(*groups)[::EVERY]


FAULTS, SOUND = chosen("faults"), chosen("cured", "healthy")


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    return record_all(FAULTS + SOUND, tmp_path_factory.mktemp("doctor"))


def names(path):
    folder = path.parts[1].replace("_", "-")
    return {folder, *ALSO.get(folder, ())}


@pytest.mark.parametrize("path", FAULTS, ids=str)
def test_a_fault_is_named_first(journals, path):
    kinds = [f.kind for f in findings(journals[path])]
    named = bool(kinds) and kinds[0] in names(path)
    assert named != (str(path) in NOT_YET), kinds


@pytest.mark.parametrize("path", FAULTS, ids=str)
def test_no_wrong_cure_is_given(journals, path):
    wrong = f"{WRONG.get(path.parts[1].replace('_', '-'), LIST)}|{LIST}"
    for finding in findings(journals[path]):
        assert not re.search(wrong, finding.advice), finding


@pytest.mark.parametrize("path", SOUND, ids=str)
def test_no_alarm_about_a_sound_script(journals, path):
    kinds = [f.kind for f in findings(journals[path]) if f.severity != "hint"]
    assert (not kinds) != (str(path) in NOT_YET), kinds


@pytest.mark.parametrize("path", FAULTS + SOUND, ids=str)
def test_everything_could_be_recorded(journals, path):
    events = read_journal(journals[path]).events
    assert [e.detail for e in events if e.detail.get("code") == "observer"] == []


@pytest.mark.parametrize("path", [p for p in SOUND if p.parts[0] == "cured"], ids=str)
def test_a_cured_script_trains(journals, path):
    first, last = re.findall(r"^loss (\S+) -> (\S+)$", output(journals[path]), re.M)[-1]
    assert float(last) < float(first)


def changed(path, diff):
    """The script with a change put in, which must fit its lines."""
    place, *lines = diff.splitlines()
    whole = (scripts_of.__globals__["HERE"] / path).read_text().splitlines()
    at = int(place.rpartition(":")[2]) - 1
    there = [line[1:] for line in lines if line[0] in " -"]
    assert whole[at : at + len(there)] == there
    whole[at : at + len(there)] = [line[1:] for line in lines if line[0] in " +"]
    return "\n".join(whole) + "\n"


def test_a_change_that_is_printed_cures_the_script(journals, tmp_path):
    """Put in by the letter: the script runs, and the doctor does not find the fault again."""
    scripts = {}
    for path in FAULTS:
        first = findings(journals[path])[0]
        if first.diff:
            name = tmp_path / f"{path.parent.name}-{path.name}"
            name.write_text(changed(path, first.diff))
            scripts[name] = first.kind
    if ALL:
        assert len(set(scripts.values())) > 5
    for path, journal in record_all(list(scripts), tmp_path).items():
        kinds = [f.kind for f in findings(journal) if f.severity != "hint"]
        assert kinds == [], (path.name, scripts[path])


def test_the_matrix(journals, capsys):
    """Printed: for each script the findings, in their order."""
    rows = [(path, [f.kind for f in findings(journals[path])]) for path in FAULTS + SOUND]
    with capsys.disabled():
        print()
        counts = Counter()
        for path, kinds in rows:
            right = kinds[:1] and kinds[0] in names(path) if path in FAULTS else not kinds
            counts["right" if right else "wrong" if kinds else "silent"] += 1
            print(f"{'' if right else '?':2}{path!s:55} {', '.join(kinds) or '-'}")
        print(", ".join(f"{n} {what}" for what, n in counts.items()))


def test_scripts_know_nothing_of_the_doctor():
    for path in scripts_of("faults", "cured", "healthy"):
        assert "gradlift" not in (scripts_of.__globals__["HERE"] / path).read_text()


def test_every_check_has_a_kind():
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)

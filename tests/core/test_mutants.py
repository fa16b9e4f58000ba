"""The list of deliberate faults (`make mutants`) fits the sources and the tests that there are."""

import re
from pathlib import Path

import pytest
from mutants.rows import MUTANTS

TESTS = Path(__file__).parents[1]
ROWS = [(suite, mutant) for suite, mutants in MUTANTS.items() for mutant in mutants]
SHARED = "".join(
    (TESTS / "conformance" / f"{name}.py").read_text() for name in ("suite", "records")
)


def test_there_are_enough_and_each_is_one_of_its_kind():
    assert len(ROWS) >= 50
    assert len({(m.file, m.old, m.new) for _, m in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("suite", "mutant"), ROWS)
def test_each_can_be_put_in_and_its_tests_exist(suite, mutant):
    assert mutant.places == 1, f"expected once in {mutant.file}: {mutant.old}"
    assert mutant.old != mutant.new
    for test in mutant.tests.split():
        file, _, name = test.partition("::")
        text = (TESTS / suite.partition("-")[0] / file).read_text()
        text += SHARED if file == "test_conformance.py" else ""
        start = rf"{name.partition('[')[0]}\(" if name else "test_"
        assert re.search(rf"^def {start}", text, re.M), test

"""DDP under Accelerate and under Lightning: two processes, of which only one has overflows."""

import json
from pathlib import Path

import pytest
from story import LRS, SCALE, SKIPPED

from gradlift import read_journal

JOB = [Path(__file__).with_name("ddp_job.py")]


@pytest.mark.parametrize(("trainer", "expected"), [("accelerate", SKIPPED), ("lightning", LRS)])
def test_both_skip_the_same_steps(done, trainer, expected):
    told = [json.loads((done / f"{rank}.json").read_text())[trainer] for rank in range(2)]
    assert told[0] == told[1]
    assert told[0][:2] == [expected, SCALE / 4]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_only_the_first_of_them_writes_the_journal(done, trainer):
    steps = read_journal(done / f"{trainer}.jsonl").steps
    assert [step.verdict.name != "APPLY" for step in steps] == SKIPPED

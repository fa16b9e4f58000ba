"""examples/ray_train.py on a real local Ray with two workers."""

import json
import os
from pathlib import Path

from gradlift import Cause, read_journal

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # Ray looks after its workers, and ends
JOB = [EXAMPLE, "--steps", "40", "--journal", "ray.jsonl"]


def test_two_ray_workers_decide_together(done):
    told = json.loads((done / "out").read_text().strip().splitlines()[-1])
    assert told["step"] == 40
    run = read_journal(done / "ray.jsonl")
    assert len(run.steps) == 40
    # Rank 0 keeps the journal, and the batch that overflowed was rank 1's.
    assert run.steps[5].cause is Cause.OVERFLOW
    assert told["skipped"] == run.skipped >= 1
    assert told["scale"] == run.steps[-1].next_scale

"""examples/ray_train.py on a real local Ray with two workers."""

import json
import subprocess
import sys
from pathlib import Path

from gradlift import Cause, read_journal

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def test_two_ray_workers_decide_together(tmp_path):
    journal = tmp_path / "ray.jsonl"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "40", "--journal", str(journal)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["step"] == 40
    run = read_journal(journal)
    assert len(run.steps) == 40
    # Rank 0 keeps the journal, and the batch that overflowed was rank 1's.
    assert run.steps[5].cause is Cause.OVERFLOW
    assert told["skipped"] == run.skipped >= 1
    assert told["scale"] == run.steps[-1].next_scale

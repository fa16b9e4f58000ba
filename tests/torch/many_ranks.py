"""Starts a job as several processes, waits for it with a limit, and leaves none behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SRC = str(HERE.parents[1] / "src")


def start(job, world, *options, folder=None):
    """One process a rank: python JOB RANK WORLD INIT_FILE OPTIONS..."""
    folder = Path(folder or tempfile.mkdtemp(prefix="gradlift-ranks-"))
    path = os.pathsep.join(p for p in (SRC, os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / job),
                str(rank),
                str(world),
                str(folder / "init"),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world)
    ]


def finish(jobs, timeout=120, expect=0):
    """What each rank said in its last line, as JSON; all are gone afterwards."""
    told = []
    try:
        for job in jobs:
            out, error = job.communicate(timeout=timeout)
            assert job.returncode == expect, error[-4000:]
            told.append(json.loads(out.strip().splitlines()[-1]) if out.strip() else None)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    return told


def run(job, world, *options, timeout=120):
    return finish(start(job, world, *options), timeout)

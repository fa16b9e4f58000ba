"""Starts a job as several processes, waits for it with a limit, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import PYTHONPATH, TESTS

JOBS = Path(TESTS) / "torch"


class Ranks(list):
    """The processes of a job, and the folder in which they find each other."""

    folder = ""


def start(job, world, *options):
    """One process a rank: python JOB RANK WORLD INIT_FILE OPTIONS..."""
    jobs = Ranks()
    jobs.folder = tempfile.mkdtemp(prefix="gradlift-ranks-")
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    for rank in range(world):
        given = [str(rank), str(world), os.path.join(jobs.folder, "init"), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen([sys.executable, str(JOBS / job), *given], env=env, **pipes))
    return jobs


def finish(jobs, timeout=120):
    """What each rank said in its last line, as JSON; all are gone afterwards."""
    told = []
    try:
        for job in jobs:
            out, error = job.communicate(timeout=timeout)
            assert job.returncode == 0, error[-4000:]
            told.append(json.loads(out.strip().splitlines()[-1]) if out.strip() else None)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
        shutil.rmtree(jobs.folder, ignore_errors=True)
    return told


def run(job, world, *options, timeout=120):
    return finish(start(job, world, *options), timeout)

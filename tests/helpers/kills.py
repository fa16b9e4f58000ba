"""A few kills of each adapter, by the command that makes a hundred: `make kills`."""

import os
import subprocess
import sys

from helpers import PYTHONPATH


def survivors(framework, kills):
    """The adapters of which every killed run came to the end of one that was not, to the bit; in a
    process of their own, because frameworks cannot be forked after their first use."""
    command = [sys.executable, "-m", "kills", "--kills", str(kills), framework]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]]

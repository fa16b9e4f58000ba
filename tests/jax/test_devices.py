"""Eight devices on one machine, in a process of its own: the number is fixed when JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).parent / "mesh_job.py"


def test_eight_devices_decide_alike():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(JOB)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[0] == "one_bad_shard_skips_all"
    assert len(told) == 8

"""Eight devices on one machine, in a process of its own: the number is fixed when JAX starts."""

import json
import os
import socket
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


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes_decide_alike():
    """One bad row, in the second process only: both skip, at the same scale, with the same bits."""
    job, port = Path(__file__).parent / "process_job.py", str(free_port())
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(job), str(index), port],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    told = []
    try:
        for each in jobs:
            out, error = each.communicate(timeout=240)
            assert each.returncode == 0, error[-3000:]
            told.append([json.loads(line) for line in out.splitlines() if line.startswith('["')])
    finally:
        for each in jobs:
            each.kill()
    assert told[0] == told[1]
    assert [name for name, _ in told[0]] == ["jit", "shard_map"]
    for _, rows in told[0]:
        causes = [cause for _, cause, _, _ in rows]
        assert causes == ["NONE", "NONE", "OVERFLOW", "NONE", "LOSS_NONFINITE", "NONE"]
        assert [scale for _, _, scale, _ in rows] == [16, 16, 8, 8, 8, 8]
        assert rows[2][3] == rows[1][3] != rows[0][3]  # a skipped step moves nothing

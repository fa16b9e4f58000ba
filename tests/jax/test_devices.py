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


DEVICES = """
import jax, jax.numpy as jnp, numpy as np, tempfile, os
from jax.sharding import Mesh, PartitionSpec as P
import gradlift.jax as gl
from gradlift import Journal, read_journal
from gradlift.errors import MisuseError

mesh = Mesh(np.array(jax.devices()), ("d",))
journal = Journal(os.path.join(tempfile.mkdtemp(), "run.jsonl"))

def step(params, scaler, x):
    f = gl.value_and_grad(lambda p, x: (p * x).sum(), axis_name="d")
    loss, grads, scaler, result = f(scaler, params, x)
    gl.log_inside(journal, result, 0)
    return grads

def run(split):
    specs = (P("d") if split else P(), P(), P("d"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(mapped)(jnp.ones(4), gl.Scaler("dynamic"), jnp.ones((4, 4) if not split else 4))

run(False)
jax.effects_barrier()
assert len(read_journal(journal.path).steps) == 1
try:
    run(True)
except MisuseError as error:
    assert "split along" in str(error)
    print("told")
"""


def test_on_four_devices_a_step_is_written_once_and_split_parameters_are_refused():
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert done.stdout == "told\n", done.stderr

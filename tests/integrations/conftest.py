"""What needs processes of its own is begun first; Accelerate's state ends with each test."""

import contextlib
import subprocess
import sys

import pytest


def has_job(item):
    """A module of tests may name a script as its `JOB`, which runs beside the tests of others."""
    return hasattr(getattr(item, "module", None), "JOB")


def pytest_collection_modifyitems(items):
    items.sort(key=has_job)  # begun first, asked for last


@pytest.fixture(scope="session", autouse=True)
def jobs(request, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        begun = {}
        for module in {item.module for item in request.session.items if has_job(item)}:
            folder = tmp_path_factory.mktemp("job")
            out, err = (stack.enter_context(open(folder / name, "w")) for name in ("out", "err"))
            command = [sys.executable, *module.JOB]
            job = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err)
            begun[module] = folder, job
            stack.callback(job.kill)
        yield begun


@pytest.fixture(scope="module")
def done(request, jobs):
    """The folder in which the module's job has run, with its output in `out`."""
    folder, job = jobs[request.module]
    assert job.wait(timeout=300) == 0, (folder / "err").read_text()[-3000:]
    return folder


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test():
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

"""Runs tests in children of a process that has imported their framework: to import it anew for
each fault would take most of the time.

    python warm.py torch numpy        then a line for each run: {"tree": ..., "tests": [...], ...}
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn


def run(job: dict[str, Any]) -> NoReturn:
    """In a child. The tree's own gradlift is imported, which the parent has never seen."""
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, other in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(other, stream)
    os.chdir(job["tree"])
    source = os.path.join(job["tree"], "src")
    os.environ["PYTHONPATH"] = source  # for the processes that tests start
    sys.path[:1] = [source]
    sys.argv[1:] = []
    import pytest

    status = int(pytest.main(job["options"]))
    sys.stdout.flush()
    os._exit(status)


def wait(child: int, seconds: float) -> int | None:
    """Its exit status; None if it took too long, and was killed with all that it had started."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    for name in ("pytest", *sys.argv[1:]):
        importlib.import_module(name)
    assert "gradlift" not in sys.modules
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            run(job)
        print(json.dumps(wait(child, job["seconds"])), flush=True)


if __name__ == "__main__":
    main()

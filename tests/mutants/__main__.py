"""Puts each fault into a copy of the tree, and runs the tests that must find it.

    PYTHONPATH=tests python -m mutants -j 2                      all of them
    PYTHONPATH=tests python -m mutants --suite torch --only masters

A fault is found if one of its tests fails there. Before, all these tests pass in a copy without a
fault. The tree itself is never changed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .mutant import TREE, Mutant
from .rows import MUTANTS

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "gradlift-runs")
_SECONDS = 300  # for the tests of one fault
_MXNET = Path(sys.prefix).with_name(".venv-mxnet") / "bin" / "python"
_WARM = {
    "core": ["numpy", "click", "rich", "hypothesis"],
    "numpy": ["numpy"],
    "torch": ["numpy", "torch", "torch._dynamo"],
    "observe": ["numpy", "torch", "torch._dynamo"],
    "jax": ["numpy", "jax", "optax"],
    "keras": ["numpy", "keras"],
    "mxnet": ["numpy", "mxnet"],
}
"""What is imported once for all faults of a suite."""


def python_of(suite: str) -> Path:
    return _MXNET if suite == "mxnet" else Path(sys.executable)


class Worker:
    """A copy of the tree, and a process with a suite's framework that runs tests there."""

    def __init__(self, tree: Path, suite: str) -> None:
        self.tree, (self.folder, _, backend) = tree, suite.partition("-")
        self.log = tree.with_name(f"{tree.name}.log")
        room = tree.with_name("tmp")  # children leave behind what tests remove at their exit
        room.mkdir(exist_ok=True)
        # A .pyc would hide a fault of the same length.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "TMPDIR": str(room)}
        self.process = subprocess.Popen(
            [python_of(suite), Path(__file__).with_name("warm.py"), *_WARM[self.folder]],
            env={**env, "KERAS_BACKEND": backend} if backend else env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: list[str], seconds: float) -> tuple[int | None, str]:
        """pytest's exit status (None: it took too long) and what it printed."""
        places = [f"tests/{self.folder}/{test}" for test in tests]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--disable-warnings", *places]
        job = {"tree": str(self.tree), "log": str(self.log), "seconds": seconds, "options": options}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        status = json.loads(self.process.stdout.readline())
        return status, self.log.read_text(errors="replace")

    def outcome(self, mutant: Mutant) -> tuple[bool, str]:
        """Was it found? And by which test, or what happened instead."""
        path = mutant.path(self.tree)
        sound = path.read_text()
        path.write_text(sound.replace(mutant.old, mutant.new))
        try:
            status, printed = self.run(mutant.tests.split(), _SECONDS)
        finally:
            path.write_text(sound)
        if status == 1:
            failed = [x for x in printed.splitlines() if x.startswith(("FAILED", "ERROR"))]
            return True, failed[0].split(" - ")[0].rpartition("tests/")[2] if failed else ""
        if status == 0:
            return False, "its tests pass"
        how = "took too long" if status is None else f"ended with {status}"
        return False, f"pytest {how}:\n{printed[-3000:]}"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def try_suite(
    suite: str, mutants: list[Mutant], trees: list[Path]
) -> Iterator[tuple[bool | None, str]]:
    """Was each found? And a line about it. None: the tests fail without any fault."""
    workers: queue.Queue[Worker] = queue.Queue()
    for tree in trees[: len(mutants)]:
        workers.put(Worker(tree, suite))

    def tried(mutant: Mutant | None) -> tuple[bool, str]:
        worker = workers.get()
        try:
            if mutant is not None:
                found, how = worker.outcome(mutant)
                word = "found   " if found else "SURVIVED"
                return found, f"{word}  {suite}  {mutant.file}: {mutant.broken}  ({how})"
            tests = list(dict.fromkeys(test for m in mutants for test in m.tests.split()))
            status, printed = worker.run(tests, 10 * _SECONDS)
            return status == 0, f"{suite}: tests fail without any fault\n{printed}"
        finally:
            workers.put(worker)

    with ThreadPoolExecutor(workers.qsize()) as pool:
        sound = pool.submit(tried, None)
        for done in as_completed([pool.submit(tried, m) for m in mutants]):
            yield done.result()
        if not sound.result()[0]:
            yield None, sound.result()[1]
    while not workers.empty():
        workers.get().close()


def chosen(suites: list[str], only: str) -> dict[str, list[Mutant]]:
    found = {}
    for suite, mutants in MUTANTS.items():
        some = [m for m in mutants if only in f"{m.file} {m.broken} {m.tests}"]
        if some and (not suites or suite in suites):
            if python_of(suite).exists():
                found[suite] = some
            else:
                print(f"{suite}: {len(some)} faults left out, {python_of(suite)} is not there")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--suite", action="append", default=[], choices=list(MUTANTS))
    parser.add_argument("--only", default="", help="faults with this text in file, words or tests")
    args = parser.parse_args()
    began = time.monotonic()
    wanted = chosen(args.suite, args.only)
    rows = [mutant for mutants in wanted.values() for mutant in mutants]
    misplaced = [m for m in rows if m.places != 1]
    for m in misplaced:
        print(f"{m.file}: this text is there {m.places} times, expected once:\n{m.old}")
    if misplaced or not rows:
        return 1
    survived, sound = 0, True
    with tempfile.TemporaryDirectory(prefix="gradlift-mutants-") as folder:
        trees = [
            Path(shutil.copytree(TREE, Path(folder) / str(n), ignore=_LEFT_OUT))
            for n in range(args.jobs)
        ]
        for suite, mutants in wanted.items():
            for found, line in try_suite(suite, mutants, trees):
                print(line, flush=True)
                survived += found is False
                sound = sound and found is not None
    minutes = (time.monotonic() - began) / 60
    print(f"{len(rows) - survived} of {len(rows)} faults found in {minutes:.1f} minutes")
    return 0 if sound and not survived else 1


if __name__ == "__main__":
    sys.exit(main())

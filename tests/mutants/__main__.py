"""Puts each fault into a copy of the tree, and runs the tests that must find it.

    python -m tests.mutants -j 2                      all of them
    python -m tests.mutants --suite torch --only masters

A fault is found if one of its tests fails there. Before, all these tests pass in a copy without a
fault. The tree itself is never changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
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


def python_of(suite: str) -> Path:
    return _MXNET if suite == "mxnet" else Path(sys.executable)


def run_tests(tree: Path, suite: str, tests: list[str], seconds: float) -> tuple[int | None, str]:
    """pytest's exit status (None: it took too long) and what it printed."""
    folder, _, backend = suite.partition("-")
    env = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault of the same length would be hidden by a .pyc
        "KERAS_BACKEND": backend,
    }
    if not backend:
        del env["KERAS_BACKEND"]
    places = [f"tests/{folder}/{test}" for test in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--disable-warnings"]
    with subprocess.Popen(
        [python_of(suite), "-m", "pytest", *options, *places],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def outcome(tree: Path, suite: str, mutant: Mutant) -> tuple[bool, str]:
    """Was it found? And by which test, or what happened instead."""
    path = mutant.path(tree)
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    try:
        status, printed = run_tests(tree, suite, mutant.tests.split(), _SECONDS)
    finally:
        path.write_text(sound)
    if status == 1:
        failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return True, failed[0].split(" - ")[0].split("/")[-1] if failed else ""
    if status == 0:
        return False, "its tests pass"
    return (
        False,
        f"pytest {'took too long' if status is None else f'ended with {status}'}:\n{printed}",
    )


def baseline(trees: queue.Queue[Path], suite: str, mutants: list[Mutant]) -> str:
    """What fails without a fault."""
    tree = trees.get()
    try:
        tests = list(dict.fromkeys(test for m in mutants for test in m.tests.split()))
        status, printed = run_tests(tree, suite, tests, 10 * _SECONDS)
        return "" if status == 0 else f"{suite}: tests fail without any fault\n{printed}"
    finally:
        trees.put(tree)


def tried(trees: queue.Queue[Path], suite: str, mutant: Mutant) -> tuple[str, Mutant, bool, str]:
    tree = trees.get()
    try:
        return suite, mutant, *outcome(tree, suite, mutant)
    finally:
        trees.put(tree)


def chosen(suites: list[str], only: str) -> Iterator[tuple[str, list[Mutant]]]:
    for suite, mutants in MUTANTS.items():
        some = [m for m in mutants if only in f"{m.file} {m.broken} {m.tests}"]
        if some and (not suites or suite in suites):
            if python_of(suite).exists():
                yield suite, some
            else:
                print(f"{suite}: {len(some)} faults left out, {python_of(suite)} is not there")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--suite", action="append", default=[], choices=list(MUTANTS))
    parser.add_argument("--only", default="", help="faults with this text in file, words or tests")
    args = parser.parse_args()
    began = time.monotonic()
    wanted = dict(chosen(args.suite, args.only))
    rows = [(suite, mutant) for suite, mutants in wanted.items() for mutant in mutants]
    misplaced = [m for _, m in rows if m.places != 1]
    for m in misplaced:
        print(f"{m.file}: this text is there {m.places} times, expected once:\n{m.old}")
    if misplaced or not rows:
        return 1
    with tempfile.TemporaryDirectory(prefix="gradlift-mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for n in range(args.jobs):
            trees.put(Path(shutil.copytree(TREE, Path(folder) / str(n), ignore=_LEFT_OUT)))
        survived = []
        with ThreadPoolExecutor(args.jobs) as pool:
            checks = [pool.submit(baseline, trees, suite, some) for suite, some in wanted.items()]
            wrong = [text for check in checks if (text := check.result())]
            if wrong:
                print("\n".join(wrong))
                return 1
            print(f"all tests pass without a fault ({time.monotonic() - began:.0f} s)", flush=True)
            for done in as_completed([pool.submit(tried, trees, *row) for row in rows]):
                suite, mutant, found, how = done.result()
                word = "found   " if found else "SURVIVED"
                print(f"{word}  {suite}  {mutant.file}: {mutant.broken}  ({how})", flush=True)
                if not found:
                    survived.append(mutant)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(rows) - len(survived)} of {len(rows)} faults found in {minutes:.1f} minutes")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

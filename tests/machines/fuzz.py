"""Many random scripts over all adapters, and what was tried.

    python -m machines.fuzz --steps 1000000 --seed 1        every suite, each in a process
    python -m machines.fuzz --steps 20000 torch jax         these suites

A failure is printed as a script, shrunk by Hypothesis, and ends its suite. `SHARES` are the parts
of all steps that the suites get: NumPy and torch the most; a step of the others costs
milliseconds. A suite whose interpreter is not there (MXNet has one of its own) is named and left
out. What was tried is also appended to the file of `--log`, a line of JSON a suite.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from . import machine

TESTS = Path(__file__).resolve().parents[1]
MXNET = TESTS.parent / ".venv-mxnet" / "bin" / "python"
SHARES = {
    "numpy": 0.46,
    "torch": 0.34,
    "mxnet": 0.10,
    "jax": 0.05,
    "keras-torch": 0.03,
    "keras-jax": 0.01,
    "keras-tensorflow": 0.01,
}
LENGTH, EXAMPLES = 50, 200


def run(suite, steps, first_seed):
    """One suite in this process."""
    folder = TESTS / suite.partition("-")[0]
    sys.path.insert(0, str(folder))
    machines = []
    for path in sorted(folder.glob("test_machine*.py")):
        machines += importlib.import_module(path.stem).MACHINES
    for each in machines:
        explore(each, steps / len(machines), first_seed)


def explore(each, steps, first_seed):
    """Scripts of one machine, until it has made so many steps."""
    begun, n = made(each), zlib.crc32(each.__name__.encode())  # no two machines alike
    while (left := steps - made(each) + begun) > 0:
        chosen = settings(
            max_examples=min(EXAMPLES, max(1, round(left / LENGTH))),
            stateful_step_count=LENGTH,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(first_seed + n)(each), settings=chosen)
        n += 1


def made(each):
    """Steps of one machine so far."""
    name = each.Driver.__name__
    return sum(n for (who, kind, _), n in machine.tally.items() if (who, kind) == (name, "action"))


def in_a_process(suite, steps, first_seed):
    """What a suite has tried, as rows of its tally; None if it failed."""
    python = MXNET if suite == "mxnet" else sys.executable
    command = [python, "-W", "ignore", "-m", "machines.fuzz", "--alone", suite]
    command += ["--steps", str(steps), "--seed", str(first_seed)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    backend = {"KERAS_BACKEND": suite.partition("-")[2]} if suite.startswith("keras") else {}
    env = os.environ | {"PYTHONPATH": path} | backend
    done = subprocess.run([*map(str, command)], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def table(rows):
    """What was tried, in words."""
    by = {kind: Counter() for kind in ("action", "window", "cause", "retries", "load", "refused")}
    adapters, windows = Counter(), Counter()
    for suite, who, kind, name, n in rows:
        by[kind][name] += n
        if kind == "action":
            adapters[f"{suite} {who}"] += n
        if kind == "window":
            windows[f"{suite} {who}"] += n
    lines = [f"{sum(adapters.values()):,} steps of {len(adapters)} machines"]
    lines += [f"    {who:32} {n:9,} steps {windows[who]:9,} windows" for who, n in adapters.items()]
    for title, kind in (("actions", "action"), ("steps not applied in full", "cause")):
        lines.append(f"{title}: " + ", ".join(f"{k} {n:,}" for k, n in by[kind].most_common()))
    lines.append(f"retries: {by['retries'].total():,}")
    lines.append("loads: " + ", ".join(f"{k} {n:,}" for k, n in by["load"].most_common()))
    refused = ", ".join(f"{k} {n:,}" for k, n in by["refused"].most_common())
    lines.append(f"refused calls: {by['refused'].total():,}: {refused}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m machines.fuzz")
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(SHARES))
    parser.add_argument("--steps", type=int, default=1_000_000, help="over all suites together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", help="a file to which what was tried is appended")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        run(given.alone, given.steps, given.seed)
        print(json.dumps([[*key, n] for key, n in machine.tally.items()]))
        return
    suites = given.suites or list(SHARES)
    whole, rows, failed = sum(SHARES[s] for s in suites), [], []
    for suite in suites:
        if suite == "mxnet" and not MXNET.exists():
            print(f"mxnet is left out: there is no {MXNET}")
            continue
        begun = time.perf_counter()
        steps = round(given.steps * SHARES[suite] / whole)
        tried = in_a_process(suite, steps, given.seed)
        if tried is None:
            failed.append(suite)
            continue
        rows += [[suite, *row] for row in tried]
        print(f"{suite}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        if given.log:
            with open(given.log, "a") as log:
                log.write(json.dumps([[suite, *row] for row in tried]) + "\n")
    print(table(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Many random scripts over all adapters, and what was tried.

    python -m machines.fuzz --steps 1000000 --seed 1        every suite, each in a process
    python -m machines.fuzz --suite torch --steps 20000     one suite

A failure is printed as a script, shrunk by Hypothesis. `SHARES` are the parts of all steps that a
suite gets: NumPy and torch the most, and compiled frameworks few, as each of their steps costs
milliseconds.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from . import machine

TESTS = Path(__file__).resolve().parents[1]
LENGTH, EXAMPLES = 50, 100
SHARES = {"numpy": 0.4, "torch": 0.4}


def fuzz(machines, steps, first_seed, shares=None):
    """Runs each machine until it has made its part of `steps`."""
    for each in machines:
        share = steps / len(machines)
        begun, n = made(each), 0
        while made(each) - begun < share:
            left = share - (made(each) - begun)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--suite", help="one folder of tests; keras-jax and the like name a backend"
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS / given.suite.partition("-")[0]))
    begun = time.perf_counter()
    fuzz(importlib.import_module("test_machine").MACHINES, given.steps, given.seed)
    print(dict(machine.tally), time.perf_counter() - begun)


if __name__ == "__main__":
    main()

"""Kills runs of every adapter and prints what came of it: `make kills`, or

python -m kills [--kills 100] [--seed 0] [numpy | torch | jax | keras ...]
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time

FRAMEWORKS = {
    "numpy": ("numpy_runs", ""),
    "torch": ("torch_runs", ""),
    "jax": ("jax_runs", ""),
    "keras-tensorflow": ("keras_runs", "tensorflow"),
    "keras-jax": ("keras_runs", "jax"),
    "keras-torch": ("keras_runs", "torch"),
}


def main():
    parser = argparse.ArgumentParser(prog="python -m kills", description=__doc__.split(":")[0])
    parser.add_argument("--kills", type=int, default=100, help="of each adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("framework", nargs="*", choices=[[], *FRAMEWORKS], default=[])
    given = parser.parse_args()
    if given.inside:
        inside(*given.framework, given.kills, given.seed)
        return
    print("| adapter | kills | where they fell | runs bit-equal | journals readable | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    bad = 0
    for framework in given.framework or FRAMEWORKS:
        bad += outside(framework, given.kills, given.seed)
    sys.exit(bad > 0)


def outside(framework, kills, seed):
    """A process of its own for each framework; how many of its adapters did not hold."""
    backend = {"KERAS_BACKEND": FRAMEWORKS[framework][1]} if FRAMEWORKS[framework][1] else {}
    command = [sys.executable, "-m", "kills", "--inside", framework]
    options = ["--kills", str(kills), "--seed", str(seed)]
    noise = tempfile.TemporaryFile("w+")  # noqa: SIM115  (frameworks that start, a hundred times)
    env = {**os.environ, **backend}
    job = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=noise, text=True, env=env
    )
    bad = 0
    for line in job.stdout:
        told = json.loads(line)
        wrong = told["different"] + told["unreadable"]
        bad += bool(wrong)
        same, readable = told["runs"] - len(told["different"]), kills - len(told["unreadable"])
        fell = ", ".join(f"{what} {n}" for what, n in sorted(told["fell"].items()))
        ended = f"{same} of {told['runs']} | {readable} of {kills}"
        print(f"| {told['name']} | {kills} | {fell} | {ended} | {told['seconds']:.0f} |")
        for text in wrong:
            print("   ", text)
        sys.stdout.flush()
    if job.wait() != 0:
        bad += 1
        noise.seek(0)
        print(f"{framework} ended with {job.returncode}: {noise.read()[-4000:]}")
    return bad


def inside(framework, kills, seed):
    from .lives import survive

    for name, training in importlib.import_module(f"kills.{FRAMEWORKS[framework][0]}").RUNS.items():
        began = time.monotonic()
        told = survive(training, kills, seed)
        print(json.dumps({"name": name, "seconds": time.monotonic() - began, **told}), flush=True)


if __name__ == "__main__":
    main()

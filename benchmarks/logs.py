"""How fast other trainers' logs are read, and in how much memory.

    python benchmarks/logs.py              a log of 100 MB of each kind
    python benchmarks/logs.py --mb 1000    of one gigabyte

Seconds of the processor, megabytes a second, and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gradlift.logs import read_log

STAMP = "[2026-11-19 04:21:51,848] [INFO] "
OVERFLOW = STAMP + "[loss_scaler.py:266:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "


def deepspeed(i: int) -> str:
    if i % 100 == 0:
        return OVERFLOW + "Attempted loss scale: 65536, reducing to 32768"
    return f"{STAMP}[logging.py:123:log_dist] [Rank 0] step={i}, skipped={i // 100}, lr=[0.01]"


def megatron(i: int) -> str:
    return (
        f" [2026-11-19 04:21:51] iteration {i:8}/  250000 | consumed samples: {i:12} | elapsed "
        f"time per iteration (ms): 86545.2 | learning rate: 9.15E-06 | global batch size:  1024 | "
        f"lm loss: {2 + i % 7:.6E} | loss scale: 65536.0 | grad norm: 1.231 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    )


def transformers(i: int) -> str:
    return (
        f"{{'loss': '{2 + i % 7}.5', 'grad_norm': '1.25', 'learning_rate': '0.001', 'epoch': '1'}}"
    )


def nanogpt(i: int) -> str:
    return f"iter {i}: loss {2 + i % 7}.7648, time 135.45ms, mfu 14.21%"


def other(i: int) -> str:
    line = "2026-11-19 04:21:51 worker {i} fetched shard 17 of 512 from the cache"
    return nanogpt(i) if i % 1000 == 0 else line.format(i=i)


KINDS: dict[str, Callable[[int], str]] = {
    f.__name__: f for f in (deepspeed, megatron, transformers, nanogpt, other)
}


def lines(kind: str, size: int) -> Iterator[str]:
    written, i = 0, 0
    while written < size:
        block = "\n".join(KINDS[kind](i + j) for j in range(1000)) + "\n"
        written, i = written + len(block), i + 1000
        yield block


def measure(kind: str, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        with open(path, "w") as out:
            out.writelines(lines(kind, size))
        begun = time.process_time()
        run = read_log(path)
        seconds = time.process_time() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = size / 1e6 / seconds
    print(f"{kind:13} {seconds:7.1f} s {rate:7.1f} MB/s {memory:7.0f} MB  {len(run.steps):,} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100)
    size = parser.parse_args().mb * 10**6
    for kind in KINDS:  # each in a process of its own, for its memory
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(kind, size))
        process.start()
        process.join()


if __name__ == "__main__":
    main()

"""Bad weather between ranks: RANK WORLD INIT_FILE CASE -> one line of JSON from who is left."""

import json
import math
import os
import pickle
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gradlift.errors import GradliftError
from gradlift.torch import GradScaler

rank, world, init, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
PATIENCE = 5.0


def begin(name="", ranks=None, me=None):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init}{name}",
        rank=rank if me is None else me,
        world_size=ranks or world,
        timeout=timedelta(seconds=90),  # ranks may start far apart on a busy machine
    )


def leave(said):
    print(json.dumps(said), flush=True)
    os._exit(0)


class Job:
    def __init__(self, **settings):
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.w], lr=1.0)
        if "rule" not in settings:
            settings["init_scale"] = 8.0
        self.scaler = GradScaler("cpu", **settings)

    def step(self, factor=1.0):
        self.optimizer.zero_grad()
        self.scaler.scale(self.w.sum() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        result = self.scaler.result
        return [result.stepped, result.cause.name, self.scaler.get_scale()]


def attempt(function):
    began = time.monotonic()
    try:
        function()
    except GradliftError as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        seconds = time.monotonic() - began
        return {"said": f"{type(error).__name__}: {error}", "from": cause, "seconds": seconds}
    return {"said": "nothing"}


def lost():
    """Rank 1 dies, or hangs, while rank 0 waits for it in the collective."""
    begin()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE))
    dist.barrier()
    job = Job(process_group=group)
    first = job.step()
    if rank == 1:
        time.sleep(0.5 if case == "dies" else PATIENCE + 3)
        os._exit(0)
    said = attempt(job.step)
    leave(
        {
            **said,
            "first": first,
            "kept": job.w.tolist(),
            "windows": len(job.scaler._scales[None].windows),
        }
    )


def skips():
    """Rank 1 does not step once: DDP's average of its next backward meets rank 0's decision."""
    begin()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, steps, kept = GradScaler("cpu", init_scale=8.0, process_group=group), 0, []

    def train():
        nonlocal steps
        for step in range(4):
            optimizer.zero_grad()
            if step == 1 and rank == 0:
                time.sleep(1.0)  # a straggler is waited for
            scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
            kept[:] = [p.detach().clone() for p in model.parameters()]
            if rank == 0 or step != 2:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                steps += 1
            scaler.update()

    try:
        said = attempt(train)
    except RuntimeError as error:  # in torch's own call
        said = {"said": f"RuntimeError: {error}"}
    kept = all(map(torch.equal, kept, model.parameters()))
    leave({**said, "steps": steps, "kept": kept})


def made_again():
    """Groups are destroyed, and other ones take their place: of as many ranks, then of one."""
    begin()
    job = Job(process_group=dist.group.WORLD)
    auto = Job(rule="auto", process_group=dist.group.WORLD)
    small = Job(process_group=dist.new_group([0, 1]))
    rows = [job.step(), auto.step(), small.step()]
    rules = [str(auto.scaler.rule)]
    dist.barrier()
    dist.destroy_process_group()
    between = attempt(job.step)["said"]
    begin("-again")
    rows += [job.step(math.nan if rank else 1.0), auto.step()]
    stale = attempt(small.step)["said"]
    copy = pickle.loads(pickle.dumps(small.scaler))
    small.scaler.process_group = dist.new_group([0, 1])
    rows.append(small.step())
    without = copy.process_group is None
    copy.process_group = dist.group.WORLD
    small.scaler = copy
    rows.append(small.step(math.inf if rank else 1.0))
    dist.barrier()
    dist.destroy_process_group()
    begin(f"-alone-{rank}", ranks=1, me=0)
    rows += [job.step(), auto.step()]
    rules.append(str(auto.scaler.rule))
    leave({"rows": rows, "stale": stale, "between": between, "without": without, "rules": rules})


def forked():
    """gradlift is imported and a scaler made; then the process forks, and the children agree."""
    job = Job()
    readers = []
    for me in range(2):
        reader, writer = os.pipe()
        if os.fork() == 0:
            begin(ranks=2, me=me)
            job.scaler.process_group = dist.group.WORLD
            rows = [job.step(), job.step(math.nan if me else 1.0)]
            os.write(writer, json.dumps(rows).encode())
            dist.barrier()
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    told = [json.loads(os.fdopen(r).read() or "null") for r in readers]
    for _ in readers:
        os.wait()
    leave({"rows": told})


{"dies": lost, "hangs": lost, "skips": skips, "made-again": made_again, "forked": forked}[case]()

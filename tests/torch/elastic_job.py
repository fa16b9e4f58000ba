"""A job for torchrun that checkpoints and resumes: elastic_job.py FOLDER STEPS [KILL_AT | sharded].

Writes a line of JSON a step to FOLDER/told.jsonl (rank 0). With KILL_AT, rank 1 is killed in the
middle of that step of its first life, after backward and before the step. DDP and torch's rule; or,
sharded, FSDP2 and "auto".
"""

import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
how = sys.argv[3] if len(sys.argv) > 3 else ""
kill_at = int(how) if how.isdigit() else -1
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
if how == "sharded":
    model = fully_shard(net)
    scaler = GradScaler("cpu", rule="auto:init_scale=2^20")
else:
    model = DistributedDataParallel(net)
    settings = {"init_scale": 2.0**20, "growth_interval": 3}
    scaler = GradScaler("cpu", **settings, process_group=dist.group.WORLD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
progress = {"step": 0}


def parts():
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler,  # a Stateful: saved and loaded by itself
        "progress": progress,
    }


def resume():
    latest = folder / "latest"
    if not latest.exists():
        return
    if not optimizer.state:  # the checkpoint is loaded into what is there
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    held = parts()
    dcp.load(held, checkpoint_id=folder / latest.read_text())
    net.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    progress.update(held["progress"])


def save():
    name = f"step-{progress['step']}"
    dcp.save(parts(), checkpoint_id=folder / name)
    dist.barrier()
    if rank == 0:
        (folder / "latest.new").write_text(name)
        os.replace(folder / "latest.new", folder / "latest")


def batch(step):
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=random)
    return x, x.sin().sum(1, keepdim=True) * (1e4 if step == 6 and rank == 1 else 1)


resume()
if rank == 0:
    with open(folder / "lives.jsonl", "a") as file:
        state = scaler.state_dict()
        print(json.dumps({"life": life, "world": dist.get_world_size(), **state}), file=file)
while progress["step"] < steps:
    step = progress["step"]
    x, y = batch(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = torch.nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    if step == kill_at and rank == 1 and life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    result = scaler.result
    scaler.update()
    progress["step"] += 1
    if rank == 0:
        with open(folder / "told.jsonl", "a") as file:
            told = {"step": step, "loss": loss.item(), "norm": result.grad_norm}
            told |= {"stepped": result.stepped, "cause": result.cause.name}
            told |= {"scale": scaler.get_scale(), "skipped": scaler.skipped_steps}
            told["norm"] = None if math.isnan(told["norm"]) else told["norm"]
            print(json.dumps(told), file=file)
    if progress["step"] % 4 == 0:
        save()
scaler.assert_in_sync()
dist.barrier()
# torch's own threads may abort the interpreter's teardown, now and then: leave without it.
os._exit(0)

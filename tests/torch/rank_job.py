"""One rank of a two-rank job: python rank_job.py RANK WORLD INIT_FILE CASE -> one line of JSON."""

import json
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler, probe

rank, world, init, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world)
torch.manual_seed(0)
quiet = "quiet" in case  # small inputs: activation gradients lie above those of the weights
model = torch.nn.Linear(8, 1, bias=not quiet)
spread = DistributedDataParallel(model) if case.endswith("ddp") else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
group = dist.group.WORLD if "group" in case else None
if "auto" in case:
    scaler = GradScaler("cpu", rule="auto", process_group=group)
else:
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3, process_group=group)
if "probe" in case and rank == 1:
    probe(model, every=2)
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) * (2.0**-6 if quiet else 1)


def loss(step):
    with torch.autocast("cpu", torch.float16):
        out = spread(x)
    value = out.float().square().mean()
    if step == 2 and rank == 1 and not quiet:
        value = value * (math.nan if "nan" in case else 1e30)
    return value


rows = []
calls = 0
for step in range(8):
    if "retry" in case:

        def closure(step=step):
            global calls
            calls += 1
            first = step == 2 and rank == 1 and scaler.get_scale() > 2.0**7
            return loss(step) if first else loss(-1)

        result = scaler.train_step(closure, optimizer, retries=6, model=model)
    else:
        optimizer.zero_grad()
        scaler.scale(loss(step)).backward()
        scaler.step(optimizer)
        result = scaler.result
        scaler.update()
    rows.append([result.stepped, result.cause.name, scaler.get_scale(), result.retries])
weights = model.weight.detach().flatten().tolist()
told = {"rows": rows, "weights": weights, "calls": calls, "rule": str(scaler.rule)}
print(json.dumps(told), flush=True)
dist.barrier()  # nobody leaves while another still talks
# torch's own threads may abort the interpreter's teardown ("terminate called without an active
# exception"), now and then; everything was said, so leave without it.
os._exit(0)

"""One rank of DDP with lifts: python layerwise_job.py RANK WORLD INIT_FILE -> one line of JSON."""

import json
import os
import sys

import torch
import torch.distributed as dist
from helpers.torch import bits
from layerwise_nets import Residual, Tied
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler
from gradlift.torch.lifting.lifting import layerwise

rank, world, init = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world)


def float32(net, lifts=None, check=True):
    """Some steps; each rank has its own batch, and its own lifts."""
    torch.manual_seed(0)
    model = net()
    spread = DistributedDataParallel(model)
    if lifts is not None:
        lifted = layerwise(spread, check=check)
        state = lifted.state_dict()
        for entry, lift in zip(state["blocks"].values(), lifts):
            entry["lift"] = lift
        lifted.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**6)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        loss = spread(torch.randn(6, 8, generator=draw)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {name: bits(p) for name, p in model.named_parameters()}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return [head(x) for head in self.heads]


def half():
    """Heads 50 binades apart in float16, with a scaler that agrees across ranks."""
    torch.manual_seed(0)
    model = Heads()
    spread = DistributedDataParallel(model)
    lifted = layerwise(spread)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule="auto", process_group=dist.group.WORLD)
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(32, 16, generator=draw)

    def loss(amp):
        with torch.autocast("cpu", torch.float16, enabled=amp):
            out = spread(x)
        return sum(o.float().square().mean() * 2.0 ** (-10 * i) for i, o in enumerate(out))

    stepped, scales = [], []
    for _ in range(8):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(loss(True)).backward()
        got = [p.grad.double() / scale for p in model.parameters()]
        averaged = [bits(p.grad) for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        stepped.append(scaler.result.stepped)
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    loss(False).backward()
    true = [p.grad.double() for p in model.parameters()]
    return {
        "stepped": stepped,
        "scales": scales,
        "errors": [((g - t).norm() / t.norm()).item() for g, t in zip(got, true)],
        "lifts": list(lifted.lifts.values()),
        "averaged": averaged,
    }


mine = [2.0 ** (3 + rank), 2.0 ** (9 - rank), 1.0, 2.0 ** (5 * rank)]
told = {
    "plain": float32(Residual),
    "checked": float32(Residual, []),
    "lifted": float32(Residual, mine, check=False),
    "tied": float32(Tied, mine),
    "tied, plain": float32(Tied),
    "lifts": mine,
    "half": half(),
}
print(json.dumps(told), flush=True)
dist.barrier()  # nobody leaves while another still talks
os._exit(0)  # torch's own threads may abort the interpreter's teardown

"""Tensor parallel, alone and inside other meshes; meshes of all shapes."""

import math

import torch
import torch.distributed as dist
from rank_stories import data, length, made, part, rank, story, told, trouble, whole, world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(torch.nn.Module):
    """A norm that sees a part of the sequence, a cut pair of layers, and one that is whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(5)
        self.up = torch.nn.Linear(5, 8)
        self.down = torch.nn.Linear(8, 5)
        self.last = torch.nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.down(self.up(self.norm(x)).relu()))


def cut(block, mesh, sequence=True):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan |= {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    return parallelize_module(block, mesh, plan)


@story
def tensor_parallel(on_device=False, sequence=True, group=None):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model, alone = cut(Block(), mesh, sequence), Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    by_hand = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    scaler = made(process_group=group, on_device=on_device)
    rows, norms, counts = [], [], set()
    for step in range(4):
        x = data(step, rows=8).reshape(2, 4, 5)  # the same on every rank
        scaler.scale(trouble(model(x).square().mean(), step)).backward()
        for p in model.parameters():  # sums that backward has left undone are not the scaler's
            if isinstance(p.grad, DTensor) and sequence:
                p.grad = p.grad.redistribute(placements=p.placements) if step else p.grad
        alone(x).square().mean().backward()
        right = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        with CommDebugMode() as comm:
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
        if step:
            counts.add(comm.get_total_counts())
        rows.append(told(scaler.result, scaler))
        norms.append([scaler.result.grad_norm, right])
        if scaler.result.stepped:
            by_hand.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
    pairs = zip(model.parameters(), alone.parameters())
    apart = max(float((whole(a.detach()) - b).detach().abs().max()) for a, b in pairs)
    return {"rows": rows, "norms": norms, "collectives": sorted(counts), "apart": apart}


@story
def tensor_parallel_on_device():
    return tensor_parallel(on_device=True, sequence=False)


@story
def tensor_parallel_with_a_group():
    return tensor_parallel(sequence=False, group=dist.group.WORLD)


@story
def tensor_parallel_loss():
    """A loss that is itself spread: a sum over ranks that nobody has done yet."""
    mesh = init_device_mesh("cpu", (world,))
    rows = []
    for on_device in (False, True):
        w = torch.nn.Parameter(
            torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        )
        optimizer = torch.optim.SGD([w], lr=1.0)
        scaler = made(process_group=None, on_device=on_device)
        scaler.scale((w * 2).sum()).backward()
        scaler.step(optimizer, max_norm=100.0)
        scaler.update()
        rows.append(
            [scaler.result.stepped, float(scaler.result.grad_norm), whole(w.detach()).tolist()]
        )
    return {"rows": rows}


@story
def tensor_parallel_drops_a_micro_batch():
    mesh = init_device_mesh("cpu", (world,))
    model = cut(Block(), mesh, sequence=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = made(process_group=None)
    with scaler.accumulate(drop_bad=True) as window:
        for micro in range(3):
            loss = model(data(micro).reshape(1, 4, 5)).square().mean()
            scaler.scale(loss).backward()
            if micro == 1 and rank == world - 1:
                part(model.up.weight.grad)[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return {"rows": [window.kept, window.dropped, *told(scaler.result, scaler)]}


@story
def tensor_parallel_in_fsdp2(on_device=False):
    """Two meshes, one inside the other: (dp, tp) for what is cut twice, dp for the rest."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = cut(Block(), mesh["tp"], sequence=False)
    fully_shard(model, mesh=mesh["dp"])
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    scaler = made(process_group=None, on_device=on_device)
    rows, norms, counts = [], [], set()
    for step in range(5):
        optimizer.zero_grad()
        x = data(step * 10 + rank // 2).reshape(1, 4, 5)
        scaler.scale(trouble(model(x).square().mean(), step)).backward()
        right = length([whole(p.grad) for p in params]) / scaler.get_scale()
        with CommDebugMode() as comm:
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
        counts.add(comm.get_total_counts())
        rows.append(told(scaler.result, scaler))
        norms.append([scaler.result.grad_norm, right])
    return {"rows": rows, "norms": norms, "collectives": sorted(counts)}


@story
def tensor_parallel_in_fsdp2_on_device():
    return tensor_parallel_in_fsdp2(on_device=True)


@story
def tensor_parallel_in_ddp():
    """Each pair of ranks cuts the model; the pairs hold the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, norms = [], []
    for group in (None, dist.group.WORLD):
        model = cut(Block(), mesh["tp"], sequence=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = made(process_group=group)
        for step in range(5):
            optimizer.zero_grad()
            x = data(step * 10 + rank // 2).reshape(1, 4, 5)
            scaler.scale(trouble(model(x).square().mean(), step)).backward()
            for p in model.parameters():
                average = part(p.grad)
                dist.all_reduce(average, group=mesh.get_group("dp"))
                average.div_(2)
            right = length([whole(p.grad) for p in model.parameters()]) / scaler.get_scale()
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
            rows.append(told(scaler.result, scaler)[:3])
            norms.append([scaler.result.grad_norm, right])
    return {"rows": rows, "norms": norms}


@story
def meshes_that_cross():
    """Parameters on rows and on columns of one mesh: all of it decides together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    spread = torch.distributed.tensor.distribute_tensor
    params = [
        torch.nn.Parameter(spread(torch.arange(1.0, 5.0), mesh[name], [Shard(0)]))
        for name in ("row", "column")
    ]
    params.append(torch.nn.Parameter(spread(torch.ones(3), mesh["row"], [Replicate()])))
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = made(process_group=None)
    sum((p * p).sum().full_tensor() for p in params).mul(scaler.get_scale()).backward()
    right = length([whole(p.grad) for p in params]) / scaler.get_scale()
    with CommDebugMode() as comm:
        norm = float(scaler.clip_grad_norm_(optimizer, 1.0))
    return {"norms": [norm, right], "collectives": comm.get_total_counts()}


@story
def a_mesh_of_some_ranks():
    """Two dimensions, and not all ranks: a group is made, by those who need it, once."""
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor([[0, 1]]))
    said = {"rows": [], "norms": []}
    if rank < 2:
        spread = torch.distributed.tensor.distribute_tensor
        for _ in range(2):
            w = torch.nn.Parameter(spread(torch.arange(4.0), mesh, [Replicate(), Shard(0)]))
            optimizer = torch.optim.SGD([w], lr=1.0)
            scaler = made(process_group=None)
            loss = (w * w).sum().full_tensor()
            scaler.scale(loss * (math.inf if rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            said["rows"].append(told(scaler.result, scaler))
    return said

"""Each rank holds a stage: a pipeline by hand."""

import functools
import math

import torch
import torch.distributed as dist
from rank_stories import (
    STORIES,
    TROUBLES,
    attempt,
    data,
    length,
    lone,
    made,
    net,
    rank,
    story,
    told,
    trouble,
    whole,
    world,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from gradlift.torch import MasterWeights


class Stage:
    """Half of a network; the last stage has the loss."""

    def __init__(self, tied=False):
        whole_net = net()
        self.first, self.last = rank == 0, rank == world - 1
        layers = [whole_net[0:2], whole_net[2:]]
        self.part = layers[0] if self.first else layers[1]
        self.tied = torch.nn.Parameter(torch.full((6,), 0.5)) if tied else None
        self.params = [*self.part.parameters(), *([self.tied] if tied else [])]

    def run(self, scaler, x, factor=1.0):
        """Forward and backward; activations and their gradients go from hand to hand."""
        shape = (len(x), 6)
        if self.first:
            h = self.part(x)
            if self.tied is not None:
                h = h * self.tied
            dist.send(h.detach(), 1)
            back = torch.empty(shape)
            dist.recv(back, 1)
            h.backward(back)
        elif self.last:
            h = torch.empty(shape)
            dist.recv(h, 0)
            h.requires_grad_()
            t = h if self.tied is None else h * self.tied
            scaler.scale(self.part(t).square().mean() * factor).backward()
            dist.send(h.grad, 0)
        if self.tied is not None:
            dist.all_reduce(self.tied.grad)


@story
def pipeline(on_device=False, tied=False, masters=False, rule=None):
    stage, alone = Stage(tied), net()
    shared = torch.nn.Parameter(torch.full((6,), 0.5))
    every = [*alone.parameters(), *([shared] if tied else [])]

    def counts(p):
        if p is stage.tied:
            return True if stage.first else None
        return True

    settings = {"rule": rule} if rule else {}
    scaler = made(sharded=counts if tied else True, on_device=on_device, **settings)
    if masters:
        optimizer = MasterWeights(torch.optim.AdamW, stage.params, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(stage.params, lr=1e-2)
    by_hand = torch.optim.AdamW(every, lr=1e-2)
    rows, norms, collectives = [], [], set()
    for step in range(6):
        x = data(step)
        kind = TROUBLES.get(step)
        stage.run(scaler, x, {"inf": 1e38, "nan": math.nan}.get(kind, 1.0))
        h = alone[0:2](x)
        alone[2:]((h * shared * shared) if tied else h).square().mean().backward()
        right = float(torch.nn.utils.clip_grad_norm_(every, 0.1))
        with CommDebugMode() as comm:
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
        collectives.add(comm.get_total_counts())
        rows.append(told(scaler.result, scaler)[:3])
        norms.append([scaler.result.grad_norm, right])
        if scaler.result.stepped:
            by_hand.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
    mine = list((alone[0:2] if stage.first else alone[2:]).parameters())
    pairs = zip(stage.part.parameters(), mine)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    said = {"rows": rows, "norms": norms, "collectives": sorted(collectives), "apart": apart}
    return {**said, "rule": str(scaler.rule)}


for _name, _how in {
    "pipeline_on_device": {"on_device": True},
    "pipeline_with_tied_weights": {"tied": True},
    "pipeline_with_tied_weights_on_device": {"tied": True, "on_device": True},
    "pipeline_with_masters": {"tied": True, "masters": True},
    "pipeline_auto": {"rule": "auto"},
}.items():
    STORIES[_name] = functools.partial(pipeline, **_how)


@story
def pipeline_with_a_frozen_end(on_device=False):
    """The last stage has the loss and nothing to train: what it knows of the loss still counts."""
    w, optimizer = lone()
    scaler = made(sharded=True, on_device=on_device)
    rows = []
    for factor in (1.0, math.nan):
        w.grad = None
        if rank == world - 1:
            scaler.scale(torch.ones(()) * factor)
        else:
            w.grad = torch.full((2,), scaler.get_scale() * factor)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        rows.append(told(scaler.result, scaler)[:3])
    return {"rows": rows}


@story
def pipeline_with_a_frozen_end_on_device():
    return pipeline_with_a_frozen_end(on_device=True)


@story
def pipeline_that_forgets_to_scale(on_device=False):
    """The first stage never has a loss; the last has scaled one, and then no more."""
    w, optimizer = lone()
    scaler, said, kept = made(sharded=True, on_device=on_device), [], []
    for step in range(3):
        w.grad = torch.full((2,), 256.0)
        if rank == world - 1 and step < 2:
            scaler.scale(torch.ones(()))
        said.append(attempt(lambda: scaler.step(optimizer)))
        scaler.update()
        kept.append(w.tolist())
    return {"said": said, "kept": kept}


@story
def pipeline_that_forgets_to_scale_on_device():
    return pipeline_that_forgets_to_scale(on_device=True)


@story
def copies_of_a_pipeline():
    """Two stages, two copies of each, averaged: all decide together, or each chain by itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "copy"))
    chain, copies = mesh.get_group("stage"), mesh.get_group("copy")
    rows, norms = [], []
    for settings in (
        {"process_group": dist.group.WORLD, "sharded": lambda p: None if rank % 2 else True},
        {"process_group": chain, "sharded": True},
    ):
        part = net(seed=rank // 2, width=6 + rank // 2)
        params = list(part.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = made(**settings)
        for step in range(5):
            optimizer.zero_grad()
            loss = part(data(10 * step + rank)).square().mean()
            if rank // 2:  # the last stage
                scaler.scale(trouble(loss, step, who=3)).backward()
            else:
                (loss * scaler.get_scale() * (math.nan if step in TROUBLES else 1.0)).backward()
            for p in params:
                dist.all_reduce(p.grad, group=copies)
                p.grad.div_(2)
            squares = torch.tensor(length([p.grad for p in params]) / scaler.get_scale()) ** 2
            dist.all_reduce(squares, group=chain)
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
            rows.append(told(scaler.result, scaler)[:3])
            norms.append([scaler.result.grad_norm, math.sqrt(float(squares))])
    return {"rows": rows, "norms": norms}


@story
def pipeline_that_was_not_announced():
    stage, scaler = Stage(), made()
    optimizer = torch.optim.SGD(stage.params, lr=1.0)
    stage.run(scaler, data(0))
    return {"said": attempt(lambda: scaler.step(optimizer))}


@story
def pipeline_without_a_group():
    stage = Stage()
    scaler = made(sharded=True, process_group=None)
    optimizer = torch.optim.SGD(stage.params, lr=1.0)
    stage.run(scaler, data(0))
    return {"said": attempt(lambda: scaler.step(optimizer))}


@story
def pipeline_drops_nothing():
    scaler = made(sharded=True)

    def drop():
        with scaler.accumulate(drop_bad=True):
            pass

    return {"said": attempt(drop)}


@story
def fsdp2_in_a_pipeline():
    """Two stages of two shards each: given all ranks, the norm is that of all stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rows, norms = [], []
    for settings in ({"process_group": dist.group.WORLD, "sharded": True}, {"process_group": None}):
        stage = net(seed=rank // 2, width=6 + rank // 2)
        fully_shard(stage, mesh=mesh["dp"])
        params = list(stage.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = made(**settings)
        for step in range(3):
            optimizer.zero_grad()
            loss = stage(data(10 * step + rank)).square().mean()
            scaler.scale(trouble(loss, step)).backward()
            mine = length([whole(p.grad) for p in params]) / scaler.get_scale()
            squares = torch.tensor(mine**2, dtype=torch.float64)
            dist.all_reduce(squares)
            right = math.sqrt(float(squares) / 2) if "sharded" in settings else mine
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
            rows.append(told(scaler.result, scaler)[:3])
            norms.append([scaler.result.grad_norm, right])
    return {"rows": rows, "norms": norms}

"""Many small distributed stories in one job: RANK WORLD INIT_FILE STORY... -> one line of JSON.

A story is a function that all ranks call together; what it returns is told under its name. It does
not assert: a rank that stops in the middle would leave the others waiting.
"""

import contextlib
import functools
import json
import math
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift import Journal, read_journal
from gradlift.errors import GradliftError
from gradlift.torch import GradScaler, MasterWeights

warnings.filterwarnings("ignore", module="torch")
rank, world, init = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STORIES = {}
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def story(function):
    STORIES[function.__name__] = function
    return function


def net(seed=0, width=6):
    """Odd sizes: over two ranks shards are uneven, over four some are empty."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3), torch.nn.Linear(3, 1)
    )


def data(seed, rows=4):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def made(**settings):
    settings.setdefault("process_group", dist.group.WORLD)
    on_device = settings.pop("on_device", False)
    if "rule" not in settings:
        settings = {"init_scale": 2.0**8, "growth_interval": 100, **settings}
    scaler = GradScaler("cpu", **settings)
    scaler._force_device_path = on_device
    return scaler


def whole(g):
    return g.full_tensor() if isinstance(g, DTensor) else g


def length(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def told(result, scaler):
    culprits = [c.described for c in result.culprits]
    return [result.stepped, result.cause.name, scaler.get_scale(), culprits]


def attempt(function):
    """What it raised, in words."""
    try:
        function()
    except GradliftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


TROUBLES = {2: "inf", 4: "nan", 6: "both"}


def trouble(loss, step, who=1):
    """On one rank only: an overflow at step 2, a dead loss at step 4, ..."""
    kind = TROUBLES.get(step) if rank == who % world else None
    if kind == "inf":
        return loss * 1e38
    return loss * math.nan if kind == "nan" else loss


def train(model, params, scaler, *, steps=6, fused=False, max_norm=0.5, truth=None, bad_grad=None):
    """The rows that all ranks must share, norms beside the truth, and collectives a step."""
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=fused)
    rows, norms, counts = [], [], set()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(data(10 * step + rank))
        scaler.scale(trouble(out.float().square().mean(), step)).backward()
        if bad_grad is not None and step == bad_grad:
            last = [p for p in params if p.grad is not None and part(p.grad).numel()][-1:]
            if rank == 1 % world:
                part(last[0].grad).view(-1)[0] = math.inf
        right = truth() / scaler.get_scale() if truth else math.nan
        with CommDebugMode() as comm:
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
        counts.add(comm.get_total_counts())
        rows.append(told(scaler.result, scaler))
        norms.append([scaler.result.grad_norm, right])
    values = [whole(p.detach()).flatten().tolist() for p in params] if truth else []
    return {"rows": rows, "norms": norms, "collectives": sorted(counts), "weights": values}


def part(g):
    return g.to_local() if isinstance(g, DTensor) else g


def of_dtensors(params):
    return lambda: length([whole(p.grad) for p in params])


# DDP


@story
def ddp(on_device=False, fused=False, group=True):
    model = DistributedDataParallel(net())
    params = list(model.parameters())
    scaler = made(on_device=on_device, process_group=dist.group.WORLD if group else None)
    return train(model, params, scaler, fused=fused, truth=of_dtensors(params))


@story
def ddp_on_device():
    return ddp(on_device=True, fused=True)


@story
def ddp_without_a_group():
    return ddp(group=False)


@story
def ddp_accumulates():
    """Three micro-batches, two of them in no_sync(); then all of them in one batch, alone."""
    model, alone = DistributedDataParallel(net()), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    scaler, plain = made(), GradScaler("cpu", init_scale=2.0**8, process_group=None)
    rows = []
    for step in range(4):
        for micro in range(3):
            sync = contextlib.nullcontext() if micro == 2 else model.no_sync()
            with sync:
                loss = model(data(100 * step + 10 * micro + rank)).square().mean() / 3
                bad = step == 1 and micro == 0 and rank == 1
                scaler.scale(loss * (math.inf if bad else 1.0)).backward()
        scaler.step(optimizers[0], max_norm=0.1)
        scaler.update()
        rows.append(told(scaler.result, scaler))
        optimizers[0].zero_grad()
        if step != 1:
            for micro in range(3):
                for r in range(world):
                    x = data(100 * step + 10 * micro + r)
                    plain.scale(alone(x).square().mean() / 3 / world).backward()
            plain.step(optimizers[1], max_norm=0.1)
            plain.update()
            optimizers[1].zero_grad()
    apart = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters()))
    return {"rows": rows, "apart": apart}


# FSDP2


@story
def fsdp2(on_device=False, fused=False, group=None, bad_grad=5):
    model = net()
    fully_shard(model[0], mp_policy=HALF)
    fully_shard(model, mp_policy=HALF)
    params = list(model.parameters())
    scaler = made(process_group=group, on_device=on_device)
    said = train(model, params, scaler, fused=fused, truth=of_dtensors(params), bad_grad=bad_grad)
    return {**said, "empty": sum(part(p).numel() == 0 for p in params)}


@story
def fsdp2_fused():
    return fsdp2(fused=True)


@story
def fsdp2_on_device():
    return fsdp2(on_device=True, fused=True)


@story
def fsdp2_with_a_group():
    return fsdp2(group=dist.group.WORLD)


@story
def fsdp2_beside_torch():
    """The same batches with torch's scaler and clipping."""
    ends, norms = [], []
    for ours in (True, False):
        model = net()
        fully_shard(model, mp_policy=HALF)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        kind = GradScaler if ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(model(data(step * 10 + rank)).float().square().mean()).backward()
            if ours:
                norm = scaler.clip_grad_norm_(optimizer, 0.1)
            else:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
            norms.append(float(norm))
            scaler.step(optimizer)
            scaler.update()
        ends.append([whole(p.detach()) for p in model.parameters()])
    apart = max(float((a - b).abs().max()) for a, b in zip(*ends))
    return {"apart": apart, "norms": [norms[:5], norms[5:]]}


@story
def fsdp2_unscales_first(on_device=False):
    """unscale_, a change by hand, then clip_grad_norm_: the norm is of the changed ones."""
    model = net()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = made(process_group=None, on_device=on_device)
    scaler.scale(model(data(rank)).square().mean()).backward()
    before = length([whole(p.grad) for p in model.parameters()]) / 2**8
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.mul_(2)
    with CommDebugMode() as comm:
        norm = float(scaler.clip_grad_norm_(optimizer, 0.01))
    scaler.step(optimizer)
    after = length([whole(p.grad) for p in model.parameters()])
    return {"norms": [norm, 2 * before], "after": after, "collectives": comm.get_total_counts()}


@story
def fsdp2_unscales_first_on_device():
    return fsdp2_unscales_first(on_device=True)


@story
def fsdp2_retries():
    """An overflow on one rank: all compute the batch again, as often as it takes."""
    model = net()
    fully_shard(model, mp_policy=HALF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = made(process_group=None)
    calls, rows = 0, []
    for step in range(4):

        def closure(step=step):
            nonlocal calls
            calls += 1
            loss = model(data(10 * step + rank)).float().square().mean()
            bad = step == 1 and rank == world - 1 and scaler.get_scale() > 2.0**6
            return loss * (1e30 if bad else 1.0)

        result = scaler.train_step(closure, optimizer, retries=4, model=model, max_norm=1.0)
        rows.append([*told(result, scaler), result.retries])
    return {"rows": rows, "calls": calls}


@story
def fsdp2_calibrates():
    model = net()
    fully_shard(model, mp_policy=HALF)
    scaler = made(rule="auto:init_scale=2^30", process_group=None)
    closure = lambda: model(data(rank)).float().square().mean() * (2.0**rank)
    return {"rows": [scaler.calibrate(closure, model=model)], "rule": str(scaler._rule)}


@story
def fsdp2_has_no_masters():
    model = net()
    fully_shard(model)
    return {"said": attempt(lambda: MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0))}


@story
def fsdp2_half_parameters_are_refused():
    model = net().half()
    fully_shard(model)
    model(data(rank).half()).float().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {"said": attempt(lambda: made(process_group=None).step(optimizer))}


# FSDP1


def fsdp1(strategy, orig, group=True):
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    mesh = {}
    if strategy == "HYBRID_SHARD":
        mesh = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))}
    model = FullyShardedDataParallel(
        net(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        **mesh,
    )
    params = list(model.parameters())

    def truth():
        squares = torch.tensor(
            sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
        )
        dist.all_reduce(squares)
        copies = {"FULL_SHARD": 1, "NO_SHARD": world, "HYBRID_SHARD": 2}[strategy]
        return math.sqrt(float(squares) / copies)

    scaler = made(process_group=dist.group.WORLD if group else None)
    said = train(model, params, scaler, truth=truth, bad_grad=5)
    return {**said, "weights": []}


for _strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"):
    for _orig in (False, True):
        _name = f"fsdp1_{_strategy.lower()}{'_orig' if _orig else ''}"
        STORIES[_name] = functools.partial(fsdp1, _strategy, _orig)
STORIES["fsdp1_without_a_group"] = functools.partial(fsdp1, "FULL_SHARD", False, False)


# Tensor parallel


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


# A pipeline by hand


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
    return {**said, "rule": str(scaler._rule)}


for _name, _how in {
    "pipeline_on_device": {"on_device": True},
    "pipeline_with_tied_weights": {"tied": True},
    "pipeline_with_tied_weights_on_device": {"tied": True, "on_device": True},
    "pipeline_with_masters": {"tied": True, "masters": True},
    "pipeline_auto": {"rule": "auto"},
}.items():
    STORIES[_name] = functools.partial(pipeline, **_how)


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


# Ranks that differ


def lone(value=1.0, n=2):
    w = torch.nn.Parameter(torch.full((n,), value))
    return w, torch.optim.SGD([w], lr=1.0)


@story
def drifted_scales(on_device=False):
    """[4, 8] is found by name and at the next step, by all; a common state mends it."""
    w, optimizer = lone()
    scaler = made(init_scale=2.0 ** (2 + rank), on_device=on_device)
    by_name = attempt(scaler.assert_in_sync)
    scaler.scale(w.sum()).backward()
    at_step = attempt(lambda: scaler.step(optimizer))
    kept = w.detach().tolist()
    state = [scaler.state_dict()]
    dist.broadcast_object_list(state)
    scaler.load_state_dict(state[0])
    w.grad = None
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer, max_norm=1e6)
    scaler.update()
    return {
        "said": [by_name, at_step],
        "kept": kept,
        "mended": attempt(scaler.assert_in_sync),
        "rows": [told(scaler.result, scaler)],
    }


@story
def drifted_scales_on_device():
    return drifted_scales(on_device=True)


@story
def drifted_later_on_device():
    """Between comparisons nobody reads the scales; but nobody steps with different ones."""
    w, optimizer = lone()
    scaler = made(on_device=True)
    for step in range(2):
        w.grad = None
        if step and rank:
            scaler._track(None).tensors.scale.mul_(2)
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"rows": [scaler.result.stepped, w.detach().tolist()]}


class NoReads(TorchDispatchMode):
    """Nothing may wait for a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal"):
            raise AssertionError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


@story
def nothing_waits_on_device():
    """After the first step, which compares scales and layouts."""
    model = net()
    fully_shard(model)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    scaler = made(on_device=True, process_group=None)
    stepped = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(
            model(data(rank)).square().mean() * (math.inf if step == 1 and rank else 1)
        ).backward()
        with NoReads() if step else contextlib.nullcontext():
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
        stepped.append([scaler.result.stepped, scaler.result.cause.name])
    return {"rows": stepped}


@story
def odd_answers():
    w, optimizer = lone()
    scaler = made(sharded=lambda p: "yes")
    scaler.scale(w.sum()).backward()
    return {"said": attempt(lambda: scaler.step(optimizer))}


@story
def drifted_counters():
    """Found only by name: scales are still the same."""
    scaler = made(process_group=None, growth_interval=100)
    w, optimizer = lone()
    for _ in range(1 + (rank == world - 1)):
        w.grad = None
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    rules = made(growth_interval=100 + rank)
    off = GradScaler("cpu", enabled=rank == 0)
    other = made(process_group=None)
    other.scale(torch.ones(()), key="d")
    if rank:
        other._track("d").put(other._track("d").numbers()._replace(scale=2.0))
    return {"said": [attempt(s.assert_in_sync) for s in (scaler, rules, off, other)]}


@story
def different_orders():
    """A set has no order; equal shapes are told apart too."""
    said = []
    for flip in (lambda ps: ps[::-1], lambda ps: [ps[2], ps[1], ps[0], *ps[3:]]):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        params = list(model.parameters())
        optimizer = torch.optim.SGD(flip(params) if rank else params, lr=1.0)
        scaler = made()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        said.append(attempt(lambda: scaler.step(optimizer)))  # noqa: B023
        again = torch.optim.SGD(params, lr=1.0)
        said.append(attempt(lambda: scaler.step(again)))  # noqa: B023
    return {"said": said}


@story
def an_extra_wrapper_is_no_difference():
    """Another module around the model, on one rank only, changes names but no order."""
    model = net()
    wrapper = (
        torch.nn.ModuleDict({"extra": torch.nn.Linear(2, 2), "model": model}) if rank else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = made()
    scaler.scale(model(data(0)).sum()).backward()
    return {"said": attempt(lambda: scaler.step(optimizer)), "kept": wrapper is not None}


# Groups


@story
def some_ranks_only():
    """A group of the first two ranks; a third goes its own way."""
    group = dist.new_group([0, 1])
    model = net(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = made(process_group=group)
    said, rows = "nothing", []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(trouble(model(data(rank)).square().mean(), step)).backward()
        if rank < 2:
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            rows.append(told(scaler.result, scaler))
        else:
            said = attempt(lambda: scaler.step(optimizer))
    return {"rows": rows, "said": said}


@story
def one_rank_is_a_group():
    group = [dist.new_group([r]) for r in range(world)][rank]
    w, optimizer = lone()
    scaler = made(process_group=group)
    with CommDebugMode() as comm:
        scaler.scale(w.sum() * (math.nan if rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"rows": told(scaler.result, scaler), "collectives": comm.get_total_counts()}


@story
def a_rank_without_gradients(on_device=False):
    w, optimizer = lone()
    rows, norms = [], []
    for sharded in (False, True):
        scaler = made(sharded=sharded, on_device=on_device)
        for value in (3.0, math.inf):
            w.grad = None
            scaler.scale(torch.zeros(())) if rank else scaler.scale(w.sum() * value).backward()
            norms.append(float(scaler.clip_grad_norm_(optimizer, 1e9)))
            scaler.step(optimizer)
            scaler.update()
            rows.append(told(scaler.result, scaler))
    return {"rows": rows, "norms": norms}


@story
def a_rank_without_gradients_on_device():
    return a_rank_without_gradients(on_device=True)


@story
def two_optimizers():
    """skip="all": one bad gradient on one rank keeps both optimizers of all ranks."""
    model = net()
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(ps, lr=0.1) for ps in (params[:2], params[2:])]
    scaler = made(skip="all")
    before = [p.detach().clone() for p in params]
    scaler.scale(model(data(0)).square().mean()).backward()
    if rank == world - 1:
        params[0].grad[0, 0] = math.inf
    with CommDebugMode() as comm:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(before, params))
    return {
        "rows": [*told(scaler.result, scaler)[:3], same],
        "collectives": comm.get_total_counts(),
    }


@story
def keys():
    w, optimizer = lone()
    v, other = lone()
    scaler = made()
    scaler.scale(w.sum(), key="a").backward()
    scaler.scale(v.sum() * (1e38 if rank else 1.0), key="b").backward()
    scaler.step(optimizer, key="a")
    scaler.step(other, key="b")
    scaler.update()
    return {"rows": [scaler.get_scale("a"), scaler.get_scale("b")]}


@story
def only_rank_0_records(rule=None, on_device=False):
    """Its journal has the norm and the peak of all ranks, from the second step at the latest."""
    model = net()
    fully_shard(model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    path = os.path.join(tempfile.gettempdir(), f"gradlift-{os.getpid()}.jsonl")
    journal = Journal(path) if rank == 0 else None
    settings = {"rule": rule} if rule else {}
    scaler = made(
        process_group=None, journal=journal, sample_every=2, on_device=on_device, **settings
    )
    truth, peaks = [], []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(data(10 * step + rank)).square().mean()).backward()
        grads = [whole(p.grad) for p in params]
        truth.append(length(grads) / scaler.get_scale())
        peaks.append(max(float(g.abs().max()) for g in grads))
        scaler.step(optimizer)
        scaler.update()
    scaler.flush()
    said = {"truth": truth, "peaks": peaks}
    if rank == 0:
        journal.close()
        run = read_journal(path)
        os.unlink(path)
        said["recorded"] = [[s.norm, s.amax] for s in run.steps]
        said["samples"] = len(run.samples)
    return said


@story
def only_rank_0_records_auto():
    return only_rank_0_records(rule="auto")


@story
def only_rank_0_records_on_device():
    return only_rank_0_records(on_device=True)


@story
def ddp_drops_a_micro_batch(group=True):
    """A dead loss on one rank is one for all: nobody lowers its scale for it."""
    rows = []
    for factor in (math.nan, 1e38):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = made(process_group=dist.group.WORLD if group else None)
        with scaler.accumulate(drop_bad=True) as window:
            for micro in range(3):
                loss = model(data(10 * micro + rank)).square().mean()
                scaler.scale(loss * (factor if micro == 1 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        rows.append([window.kept, window.dropped, *told(scaler.result, scaler)])
    return {"rows": rows}


@story
def ddp_drops_a_micro_batch_without_a_group():
    return ddp_drops_a_micro_batch(group=False)


@story
def fsdp2_drops_nothing():
    model = net()
    fully_shard(model)
    scaler = made(process_group=None)

    def drop():
        with scaler.accumulate(drop_bad=True):
            scaler.scale(model(data(rank)).square().mean()).backward()

    return {"said": attempt(drop)}


@story
def masters_under_ddp():
    model = DistributedDataParallel(net().half())
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scaler = made()
    rows = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(data(10 * step + rank).half()).float().square().mean()
        scaler.scale(trouble(loss, step)).backward()
        scaler.step(optimizer, max_norm=0.1)
        scaler.update()
        rows.append([*told(scaler.result, scaler), scaler.result.grad_norm])
    return {"rows": rows, "weights": [m.flatten().tolist() for m in optimizer.masters]}


@story
def masters_under_fsdp1():
    """float16 shards have masters; the norm is that of all of them."""
    model = FullyShardedDataParallel(net().half(), device_id=torch.device("cpu"))
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scaler = made()
    rows, norms = [], []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(data(10 * step + rank).half()).float().square().mean()
        scaler.scale(trouble(loss, step)).backward()
        squares = sum(p.grad.double().square().sum() for p in model.parameters())
        dist.all_reduce(squares)
        norms.append([0.0, math.sqrt(float(squares)) / scaler.get_scale()])
        scaler.step(optimizer, max_norm=0.1)
        scaler.update()
        rows.append(told(scaler.result, scaler)[:3])
        norms[-1][0] = scaler.result.grad_norm
    return {"rows": rows, "norms": norms}


# Four ranks


@story
def hsdp(on_device=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))
    model = net()
    fully_shard(model, mesh=mesh, mp_policy=HALF)
    params = list(model.parameters())
    scaler = made(process_group=None, on_device=on_device)
    said = train(model, params, scaler, truth=of_dtensors(params), bad_grad=5)
    return {**said, "empty": sum(part(p).numel() == 0 for p in params)}


@story
def hsdp_on_device():
    return hsdp(on_device=True)


@story
def hsdp_with_the_wrong_group():
    """A group of one column does not hold all parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))
    model = net()
    fully_shard(model, mesh=mesh)
    model(data(rank)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrong = attempt(lambda: made(process_group=mesh.get_group("copy")).step(optimizer))
    row = made(process_group=mesh.get_group("cut"))
    right = length([whole(p.grad) for p in model.parameters()]) / row.get_scale()
    one_stage = made(sharded=True)
    ours = [float(s.clip_grad_norm_(optimizer, 1e9)) for s in (row, one_stage)]
    return {"said": wrong, "norms": [[n, right] for n in ours]}


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


def main():
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{init}", rank=rank, world_size=world, timeout=limit
    )
    said = {}
    for name in sys.argv[4:]:
        try:
            said[name] = STORIES[name]()
        except Exception:
            said[name] = {"failed": traceback.format_exc()}
        dist.barrier()
    print(json.dumps(said), flush=True)
    dist.barrier()  # nobody leaves while another still talks
    # torch's own threads may abort the interpreter's teardown, now and then; everything was said.
    os._exit(0)


main()

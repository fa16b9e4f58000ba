"""Each rank holds shards: FSDP2, HSDP, FSDP1."""

import contextlib
import functools
import math
import os
import tempfile

import torch
import torch.distributed as dist
from rank_stories import (
    HALF,
    STORIES,
    attempt,
    data,
    length,
    made,
    net,
    of_dtensors,
    part,
    rank,
    story,
    told,
    train,
    trouble,
    whole,
    world,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift import Journal, read_journal
from gradlift.torch import GradScaler, MasterWeights


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
    return {"rows": [scaler.calibrate(closure, model=model)], "rule": str(scaler.rule)}


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


@story
def fsdp1_beside_torchs_sharded_scaler():
    """What torch's own tests ask of ShardedGradScaler, of both: an inf in one rank's shard skips
    the step on all; weights and scales are those of DDP on the same batches."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    rows = {}
    for name in ("torch", "ours", "ddp"):
        if name == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(net())
        else:
            model = FullyShardedDataParallel(
                net(), use_orig_params=True, device_id=torch.device("cpu")
            )
        kind = ShardedGradScaler if name == "torch" else GradScaler
        scaler = kind("cpu", 2.0**8, growth_interval=2, process_group=dist.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            loss = model(data(10 * step + rank)).square().mean()
            scaler.scale(loss).backward()
            with torch.no_grad():
                held = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
                if step == 3 and (rank == 1 or name == "ddp"):
                    held[0].view(-1)[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        if name == "ddp":
            state = model.module.state_dict()
        else:
            with FullyShardedDataParallel.summon_full_params(model):
                state = {k: v.clone() for k, v in model.module.state_dict().items()}
        rows[name] = [scales, [v.double().reshape(-1).tolist() for v in state.values()]]
    return rows


for _strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"):
    for _orig in (False, True):
        _name = f"fsdp1_{_strategy.lower()}{'_orig' if _orig else ''}"
        STORIES[_name] = functools.partial(fsdp1, _strategy, _orig)


STORIES["fsdp1_without_a_group"] = functools.partial(fsdp1, "FULL_SHARD", False, False)


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
def only_rank_0_records(rule=None, on_device=False):
    """Its journal has the norm and the peak of all ranks, from the second step at the latest."""
    model = net()
    fully_shard(model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    path = os.path.join(tempfile.gettempdir(), f"gradlift-{os.getpid()}.jsonl")
    journal = Journal(path) if rank == 0 else None
    settings = {"rule": rule} if rule else {}
    scaler = made(process_group=None, journal=journal, every=2, on_device=on_device, **settings)
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
def fsdp2_drops_nothing():
    model = net()
    fully_shard(model)
    scaler = made(process_group=None)

    def drop():
        with scaler.accumulate(drop_bad=True):
            scaler.scale(model(data(rank)).square().mean()).backward()

    return {"said": attempt(drop)}


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


@story
def hsdp(on_device=False, one_copy=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))
    model = net()
    fully_shard(model, mesh=mesh, mp_policy=HALF)
    params = list(model.parameters())
    group = mesh.get_group("cut") if one_copy else None
    scaler = made(process_group=group, on_device=on_device)
    bad_grad = None if one_copy else 5
    said = train(model, params, scaler, truth=of_dtensors(params), bad_grad=bad_grad)
    return {**said, "empty": sum(part(p).numel() == 0 for p in params)}


@story
def hsdp_on_device():
    return hsdp(on_device=True)


@story
def hsdp_over_one_copy():
    return hsdp(one_copy=True)


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
    one_stage.get_scale()  # gradients scaled by hand
    ours = [float(s.clip_grad_norm_(optimizer, 1e9)) for s in (row, one_stage)]
    return {"said": wrong, "norms": [[n, right] for n in ours]}

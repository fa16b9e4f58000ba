"""Every rank holds every parameter: DDP, groups of some ranks, ranks that differ."""

import contextlib
import math

import torch
import torch.distributed as dist
from rank_stories import (
    attempt,
    data,
    lone,
    made,
    net,
    of_dtensors,
    rank,
    story,
    told,
    train,
    trouble,
    world,
)
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler, MasterWeights


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
                bad = {1: math.inf, 2: 1e38}.get(step) if micro == 0 and rank == 1 else None
                scaler.scale(loss * (bad or 1.0)).backward()
        scaler.step(optimizers[0], max_norm=0.1)
        scaler.update()
        rows.append(told(scaler.result, scaler))
        optimizers[0].zero_grad()
        if step not in (1, 2):
            for micro in range(3):
                for r in range(world):
                    x = data(100 * step + 10 * micro + r)
                    plain.scale(alone(x).square().mean() / 3 / world).backward()
            plain.step(optimizers[1], max_norm=0.1)
            plain.update()
            optimizers[1].zero_grad()
    apart = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters()))
    return {"rows": rows, "apart": apart}


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
            scaler._scales[None].home.state.scale.mul_(2)
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"rows": [scaler.result.stepped, w.detach().tolist()]}


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
        other._scales["d"].put(other._scales["d"].numbers()._replace(scale=2.0))
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
    """Another module around one model, or two, on one rank only, changes names but no order."""
    said, kept = [], []
    for models in ([net()], [net(0), net(1)]):
        inside = [torch.nn.Linear(2, 2), *models]
        kept.append(torch.nn.ModuleList(inside) if rank else None)
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=1.0)
        scaler = made()
        scaler.scale(sum(m(data(0)).sum() for m in models)).backward()
        said.append(attempt(lambda: scaler.step(optimizer)))  # noqa: B023
    return {"said": said, "kept": kept[0] is not None}


@story
def a_view_of_some_layers_is_no_difference():
    """On one rank only. The optimizer's order is not the model's: weights come before biases."""
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    view = torch.nn.Sequential(model[1], model[2]) if rank else None
    optimizer = torch.optim.SGD(sorted(model.parameters(), key=lambda p: -p.ndim), lr=1.0)
    scaler = made()
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    return {"said": attempt(lambda: scaler.step(optimizer)), "kept": view is not None}


@story
def frozen_on_one_rank():
    """It would be stepped on the others only."""
    model = net()
    model[0].requires_grad_(rank == 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = made()
    scaler.scale(model(data(0)).sum()).backward()
    return {"said": attempt(lambda: scaler.step(optimizer))}


@story
def clipped_on_one_rank(on_device=False):
    w, optimizer = lone()
    scaler = made(on_device=on_device)
    scaler.scale(w.sum()).backward()
    said = attempt(lambda: scaler.step(optimizer, max_norm=None if rank else 1.0))
    return {"said": said, "kept": w.tolist()}


@story
def clipped_on_one_rank_on_device():
    return clipped_on_one_rank(on_device=True)


@story
def groups_that_are_none():
    """A mesh instead of its group; a group that cannot send what lies on this device."""
    w, optimizer = lone()
    mesh = init_device_mesh("cpu", (world,))
    other = dist.new_group(backend="cuda:gloo")
    scalers = [made(process_group=group) for group in (mesh, other)]
    for scaler in scalers:
        scaler.scale(w.sum()).backward()
    return {"said": [attempt(lambda s=s: s.step(optimizer)) for s in scalers]}


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
def two_optimizers(on_device=False):
    """skip="all": one bad gradient on one rank keeps both optimizers of all ranks."""
    model = net()
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(ps, lr=0.1, fused=on_device) for ps in (params[:2], params[2:])]
    scaler = made(skip="all", on_device=on_device)
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
def two_optimizers_on_device():
    return two_optimizers(on_device=True)


@story
def two_optimizers_and_nothing_left(on_device=False):
    w, optimizer = lone()
    v, other = lone()
    scaler = made(process_group=None, on_device=on_device)
    with scaler.accumulate(drop_bad=True) as window:
        for _ in range(2):
            scaler.scale(((w + v) * 1e37).sum()).backward()
    scaler.step(optimizer)
    scaler.step(other)
    scaler.update()
    return {"rows": [window.dropped, *told(scaler.result, scaler)]}


@story
def two_optimizers_and_nothing_left_on_device():
    return two_optimizers_and_nothing_left(on_device=True)


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
def ddp_drops_a_micro_batch(group=True):
    """A non-finite loss on one rank is one for all: no rank lowers its scale for it."""
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
def edited_on_one_rank(on_device=False):
    """A bad edit on rank 1, after the ranks had agreed: rank 0 cannot know."""
    said, kept = [], []
    for first in ("unscale_", "clip_grad_norm_"):
        w, optimizer = lone()
        scaler = made(on_device=on_device, names={"w": w})
        scaler.scale(w.sum()).backward()
        if first == "unscale_":
            scaler.unscale_(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1e6)
        if rank:
            w.grad[0] = math.nan
        said.append(attempt(lambda: scaler.step(optimizer)))  # noqa: B023
        kept.append(w.detach().tolist())
    w, optimizer = lone()  # and what was bad before stays a skip, on all ranks
    scaler = made(on_device=on_device, names={"w": w})
    scaler.scale(w.sum() * (math.inf if rank else 1.0)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    said.append(attempt(lambda: scaler.step(optimizer)))
    kept.append(w.detach().tolist())
    return {"said": said, "kept": kept}


@story
def edited_on_one_rank_on_device():
    return edited_on_one_rank(on_device=True)


@story
def flags_reduced_by_hand(on_device=False, fused=False, subclass=False):
    """Without a group: the script reduces what the scaler hands out, as sharded optimizers want."""
    scaler = made(on_device=on_device, process_group=None)
    if subclass:
        scaler = Reducing("cpu", init_scale=2.0**8, growth_interval=100)
    model, rows = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(data(step)).square().mean()).backward()
        if step in (2, 3) and rank == step - 2:
            model[0].weight.grad[0, 0] = math.inf
        if not subclass:
            scaler.unscale_(optimizer)
            for v in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(v, op=dist.ReduceOp.MAX)
        scaler.step(optimizer)
        stepped = scaler.result.stepped
        scaler.update()
        rows.append([stepped, scaler.get_scale()])
    return {"rows": rows, "weights": model[0].weight.tolist(), "skipped": scaler.skipped_steps}


@story
def flags_reduced_by_hand_on_device():
    return flags_reduced_by_hand(on_device=True, fused=True)


@story
def flags_reduced_by_a_subclass():
    return flags_reduced_by_hand(subclass=True)


class Reducing(GradScaler):
    """All ranks skip what one of them would."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for v in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(v, op=dist.ReduceOp.MAX)

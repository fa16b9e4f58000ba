"""Ranks with different numbers of batches: one that has none left stands in for its part."""

import contextlib
import math
import time
import warnings

import torch
import torch.distributed as dist
from rank_stories import attempt, data, made, net, rank, story, told, trouble
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from gradlift.torch import GradScaler


def uneven(batches, *, optimizers=1, micro=1, calls="step", **settings):
    """`batches[rank]` steps inside join(), then one of all ranks. The last rank's loss is NaN at
    step 4 and its gradients overflow at step 2, if it comes so far."""
    model, scaler = DistributedDataParallel(net()), made(**settings)
    params, rows = list(model.parameters()), []
    steppers = [torch.optim.SGD(params[i::optimizers], lr=0.1) for i in range(optimizers)]

    def step(n):
        for i in range(micro):
            sync = contextlib.nullcontext() if i == micro - 1 else model.no_sync()
            with sync:
                loss = model(data(100 * n + 10 * i + rank)).square().mean()
                scaler.scale(trouble(loss, n, who=len(batches) - 1)).backward()
        for optimizer in steppers:
            if calls == "unscale":
                scaler.unscale_(optimizer)
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer, max_norm=0.5 if calls == "clip" else None)
        scaler.update()
        for optimizer in steppers:
            optimizer.zero_grad()
        rows.append(told(scaler.result, scaler)[:3])

    began = time.monotonic()
    with scaler.join(model):
        for n in range(batches[rank]):
            step(n)
    seconds = time.monotonic() - began
    inside, enabled = len(rows), model._join_config.enable
    scaler.assert_in_sync()
    step(7)
    scaler.assert_in_sync()
    weights = [p.detach().flatten().tolist() for p in params]
    state = scaler.state_dict()
    return {
        "rows": rows,
        "inside": inside,
        "weights": weights,
        "steps": state["gradlift"]["steps"],
        "scale": state["scale"],
        "enabled": enabled,
        "seconds": seconds,
    }


@story
def a_rank_leaves():
    return uneven([2, 6])


@story
def a_rank_leaves_on_device():
    return uneven([2, 6], on_device=True, calls="clip")


@story
def a_rank_has_no_batch_at_all():
    return uneven([0, 3], calls="clip")


@story
def a_rank_leaves_that_accumulates():
    return uneven([1, 3], micro=3)


@story
def a_rank_leaves_with_two_optimizers():
    return uneven([1, 3], optimizers=2, calls="unscale")


@story
def ranks_leave_one_by_one():
    return uneven([1, 3, 6])


@story
def a_rank_leaves_with_old_moments():
    model, scaler = DistributedDataParallel(net()), made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with scaler.join(model):
            for n in range(1 + rank):
                scaler.scale(model(data(n)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    return {"said": [str(w.message) for w in caught if "join()" in str(w.message)]}


@story
def a_rank_leaves_ddp_alone():
    """DDP's own join() knows nothing of the scaler: refused at the first step, by all at once."""
    model, scaler = DistributedDataParallel(net()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def train():
        with model.join():
            for n in range(2 + 2 * rank):
                scaler.scale(model(data(n)).square().mean()).backward()
                scaler.step(optimizer)

    began = time.monotonic()
    said = attempt(train)
    seconds = time.monotonic() - began
    dist.barrier()
    kept = all(map(torch.equal, before, model.parameters()))
    both = attempt(lambda: Join([model, scaler]))
    bare = attempt(lambda: scaler.join(model.module).__enter__())
    return {"said": [said, both, bare], "kept": kept, "seconds": seconds}


@story
def without_a_group_a_rank_leaves_as_with_torch():
    model, scaler = DistributedDataParallel(net()), GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scaler.join(model):
        for n in range(1 + 2 * rank):
            optimizer.zero_grad()
            loss = model(data(n)).square().mean() * (math.nan if n == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    return {"weights": weights, "state": scaler.state_dict()["gradlift"]["steps"]}


@story
def a_rank_leaves_and_all_are_to_stop():
    """throw_on_early_termination: torch's own error, on every rank; and join() switched off."""
    model, scaler = DistributedDataParallel(net()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches, **how):
        with scaler.join(model, **how):
            for n in range(batches):
                optimizer.zero_grad()
                scaler.scale(model(data(n)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()

    try:
        train(1 + rank, throw_on_early_termination=True)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    train(2, enable=False)
    return {"said": said, "steps": scaler._scales[None].steps}


@story
def a_rank_skips_a_call_inside_join():
    """Rank 2 has left, rank 1 does not step in its second pass: all three say so, at once."""
    model, scaler = DistributedDataParallel(net()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with scaler.join(model):
            for n in range(1 if rank == 2 else 3):
                scaler.scale(model(data(n)).square().mean()).backward()
                if rank != 1 or n != 1:
                    scaler.step(optimizer)
                scaler.update()

    return {"said": attempt(train), "steps": scaler._scales[None].steps}

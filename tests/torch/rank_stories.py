"""What the stories of distributed_job.py share: small networks, one rank's trouble, what is told.

A story is a function that all ranks call together; what it returns is told under its name. It does
not assert: a rank that stops in the middle would leave the others waiting.
"""

import math
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from gradlift.errors import GradliftError
from gradlift.torch import GradScaler

warnings.filterwarnings("ignore", module="torch")

rank, world = int(sys.argv[1]), int(sys.argv[2])
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
    """On one rank only: an overflow at step 2, a non-finite loss at step 4, ..."""
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


def lone(value=1.0, n=2):
    w = torch.nn.Parameter(torch.full((n,), value))
    return w, torch.optim.SGD([w], lr=1.0)

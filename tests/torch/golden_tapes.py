"""Op tapes: every aten op of one steady step on the device path, and its reads to the host.

A tape begins with the loss and ends after `update()`: backward, clipping, step, all that is told.
"""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from golden_tools import HOW, LR, Net, Patchy, forced, one_thread, optimizer_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradlift.torch import GradScaler, MasterWeights

WARM_UP = 2
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "b"}


class Tape(TorchDispatchMode):
    """Writes down each op with the tensors it is given."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.ops.append(f"{func}({', '.join(map(_described, given))})")
        return func(*args, **kwargs)


class Reads(TorchFunctionMode):
    """Counts what fetches a value: on the CPU not all of it is an op."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _described(t):
    name = str(t.dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}{list(t.shape)}".replace(" ", "")


def recorded(step):
    """The tape of one step, after two that warm up. `step(i)` returns what is to be recorded."""
    with one_thread():
        for i in range(WARM_UP):
            step(i)()
        rest = step(WARM_UP)
        with Reads() as reads, Tape() as tape:
            rest()
    scalars = sum(op.startswith("aten._local_scalar_dense") for op in tape.ops)
    host = {**reads.counts, "_local_scalar_dense": scalars}
    return {
        "reads": sum(reads.counts.values()),
        "host": dict(sorted(host.items())),
        "ops": tape.ops,
    }


def tape(record):
    def made(*args, **kwargs):
        with TemporaryDirectory() as folder:
            return recorded(record(Path(folder) / "run.jsonl", *args, **kwargs))

    return made


@tape
def single(path, name, how, clipped, journal, rule="dynamic:init_scale=2^10"):
    net = Net()
    optimizer = optimizer_of(name, how, net.parameters())
    scaler = GradScaler("cpu", rule=rule, names=net, journal=path if journal else None)
    return one(forced(scaler, "device"), net, optimizer, 0.25 if clipped else None)


def one(scaler, net, optimizer, max_norm=None):
    def step(i):
        optimizer.zero_grad()
        loss = net(i)

        def rest():
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()

        return rest

    return step


@tape
def unscaled(path, how, edited):
    net = Net()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    scaler = forced(GradScaler("cpu", init_scale=2.0**10, names=net), "device")

    def step(i):
        optimizer.zero_grad()
        loss = net(i)

        def rest():
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if edited:
                net.above.grad = net.above.grad * 0.5
            scaler.clip_grad_norm_(optimizer, 0.25)
            scaler.step(optimizer)
            scaler.update()

        return rest

    return step


@tape
def several(path, how, skip, journal, keyed):
    """Two networks: one scale and two optimizers, or a scale for each."""
    nets = [Net(0), Net(1)]
    optimizers = [optimizer_of("AdamW", how, net.parameters()) for net in nets]
    rule = "dynamic:init_scale=2^10"
    scaler = GradScaler("cpu", rule=rule, skip=skip, journal=path if journal else None)
    forced(scaler, "device")
    keys = ("a", "b") if keyed else (None, None)

    def step(i):
        losses = []
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad()
            losses.append(net(i))

        def rest():
            for loss, key in zip(losses, keys):
                scaler.scale(loss, key=key).backward()
            for optimizer, key in zip(optimizers, keys):
                scaler.step(optimizer, key=key)
            scaler.update()

        return rest

    return step


@tape
def accumulated(path, drop_bad):
    net = Net()
    optimizer = optimizer_of("AdamW", "fused", net.parameters())
    scaler = forced(GradScaler("cpu", init_scale=2.0**10, names=net), "device")

    def step(i):
        optimizer.zero_grad()
        losses = [net(2 * i), net(2 * i + 1)]

        def rest():
            with scaler.accumulate(drop_bad=drop_bad):
                for loss in losses:
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return rest

    return step


@tape
def masters(path, dtype, update, how, clipped, journal):
    net = Patchy(dtype)
    settings = HOW[how] if how else {}
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = MasterWeights(torch.optim.AdamW, params, update=update, lr=LR, **settings)
    rule = "dynamic:init_scale=2^10"
    scaler = GradScaler("cpu", rule=rule, names=net, journal=path if journal else None)
    return one(forced(scaler, "device"), net, optimizer, 0.25 if clipped else None)


def _tapes():
    made = {}
    onoff = (False, True)
    words = {False: "", True: "/clipped"}, {False: "", True: "/journal"}
    for name, how in itertools.product(("AdamW", "SGD"), HOW):
        for clipped, journal in itertools.product(onoff, onoff):
            title = f"{name}/{how}{words[0][clipped]}{words[1][journal]}"
            made[title] = partial(single, name, how, clipped, journal)
    for how in HOW:
        made[f"auto/{how}/clipped"] = partial(single, "AdamW", how, True, False, rule="auto")
        made[f"unscaled/{how}"] = partial(unscaled, how, False)
        made[f"unscaled/{how}/edited"] = partial(unscaled, how, True)
    for how, journal in itertools.product(("plain", "fused"), onoff):
        for skip in ("each", "all"):
            title = f"two optimizers/{how}/{skip}{words[1][journal]}"
            made[title] = partial(several, how, skip, journal, False)
        made[f"keys/{how}{words[1][journal]}"] = partial(several, how, "each", journal, True)
    for drop_bad in onoff:
        made[f"accumulate/{'drop_bad' if drop_bad else 'all'}"] = partial(accumulated, drop_bad)
    half, brain = torch.float16, torch.bfloat16
    for clipped, journal in itertools.product(onoff, onoff):
        title = f"masters/fp16{words[0][clipped]}{words[1][journal]}"
        made[title] = partial(masters, half, "masters", None, clipped, journal)
    made["masters/fp16/foreach"] = partial(masters, half, "masters", "foreach", True, False)
    for update in ("masters", "split", "stochastic"):
        made[f"masters/bf16/{update}"] = partial(masters, brain, update, None, True, False)
    return made


TAPES = _tapes()

"""Golden stories: what the torch adapter did before it was redesigned, to the bit.

`STORIES` is name -> function() that returns what happened, JSON-able. `test_golden.py` compares it
with what is stored. To record anew, on purpose only:

    python tests/torch/golden_stories.py --write
"""

import contextlib
import copy
import io
import itertools
import json
import math
import pickle
import sys
import time
from functools import partial

import golden_tapes
import torch
from golden_tools import (
    BIG,
    HOW,
    LR,
    Net,
    Noisy,
    Patchy,
    backward,
    data,
    digest,
    forced,
    journal_of,
    optimizer_of,
    plain,
    tell,
    write,
)
from torch import nn

from gradlift.torch import GradScaler, MasterWeights, find_scale, half_model, layerwise, probe

try:
    from gradlift.integrations.apex import amp
except ImportError:
    from gradlift.apex import amp

STORIES = {}
PATHS = ("host", "device")
RULES = {
    "dynamic": "dynamic:growth_interval=2",
    "auto": "auto",
    "static": "static:1024",
}
# Clean steps with growth, an overflow, a NaN loss, nothing at all, gradients that others spoilt.
DAYS = (1.0, 0.5, BIG, "nan loss", "no gradients", 0.25, 0.5, "inf", 1.0, "nan", 0.5)
CLIPPED = {1: 0.0625, 6: 0.0625, 7: 0.0625, 8: 64.0}  # day -> max_norm
LONG = (
    *(1.0, 2.0, BIG, 0.5, "nan loss", 0.5, "inf", "nan", "inf loss"),
    *(0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, BIG, BIG, 1.0),
)


def story(name, *axes):
    """Registers a story, once for each combination of what the axes offer."""

    def register(function):
        for chosen in itertools.product(*axes):
            title = "/".join([name, *map(str, chosen)])
            assert title not in STORIES
            STORIES[title] = partial(tell, function, *chosen)
        return function

    return register


# One optimizer


@story("one", RULES, ("SGD", "AdamW"), HOW, PATHS, ("quiet", "journal"))
def one(book, rule, name, how, path, journal):
    net = Net()
    optimizer = optimizer_of(name, how, net.parameters())
    book.scaler(path, journal == "journal", rule=RULES[rule], names=net)
    for day, what in enumerate(DAYS):
        book.step(net, optimizer, what, day, max_norm=CLIPPED.get(day))
    book.close(net, optimizer)


@story("long", ("dynamic:growth_interval=3", "auto", "megatron:growth_interval=3"), PATHS)
def long(book, rule, path):
    net = Net()
    optimizer = optimizer_of("AdamW", "fused", net.parameters())
    book.scaler(path, True, rule=rule, every=6)  # names are found by themselves
    for day, what in enumerate(LONG):
        book.step(net, optimizer, what, day)
    book.close(net, optimizer)


@story("torch's arguments", PATHS)
def torch_arguments(book, path):
    net = Net()
    optimizer = optimizer_of("SGD", "foreach", net.parameters())
    heard = []
    scaler = book.scaler(
        path,
        init_scale=3000.0,
        growth_factor=3.0,
        backoff_factor=0.25,
        growth_interval=2,
        max_scale=2.0**14,
        on_event=lambda e: heard.append(plain(list(e))),
    )
    for day, what in enumerate(DAYS):
        book.step(net, optimizer, what, day)
        if day == 6:
            scaler.update(new_scale=100.0)
            scaler.set_growth_interval(1)
            scaler.set_growth_factor(2.0)
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    book.note("factors", factors)
    book.note("tracker", scaler._get_growth_tracker())
    book.close(net, optimizer)
    book.note("heard", heard)


@story("not scaled", ("disabled", "off"))
def not_scaled(book, how):
    net = Net()
    optimizer = optimizer_of("SGD", "foreach", net.parameters())
    book.scaler(**({"enabled": False} if how == "disabled" else {"rule": "off"}))
    for day, what in enumerate((1.0, 0.5, BIG)):
        book.step(net, optimizer, what, day, max_norm=0.0625)
    book.close(net, optimizer)


# What else a loss, a gradient or an optimizer can be


@story("losses", ("list", "tuple", "generator", "vector", "float64", "bfloat16"), PATHS)
def losses(book, kind, path):
    net = Net()
    optimizer = optimizer_of("AdamW", "foreach", net.parameters())
    scaler = book.scaler(path, True, rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, 0.5, BIG, 1.0)):
        optimizer.zero_grad()
        pair = [net(day, what), net(day + 20, what)]
        if kind == "vector":
            scaled = [scaler.scale(torch.stack(pair)).sum()]
        elif kind in ("float64", "bfloat16"):
            scaled = [scaler.scale(sum(pair).to(getattr(torch, kind)))]
        else:
            make = {"list": list, "tuple": tuple, "generator": iter}[kind]
            scaled = scaler.scale(make(pair))
        book.note(f"type {day}", type(scaled).__name__)
        sum(scaled).backward()
        scaler.step(optimizer)
        scaler.update()
        book.line(what)
    book.close(net, optimizer)


@story("sparse gradients", PATHS)
def sparse_gradients(book, path):
    table = nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(data((6, 3), 0))
    optimizer = torch.optim.SGD(table.parameters(), lr=LR)
    scaler = book.scaler(path, True, rule="dynamic:growth_interval=2", names=table)
    for day, factor in enumerate((1.0, math.inf, 0.5, 2.0)):
        optimizer.zero_grad()
        out = table(torch.tensor([day, 1, 1, 5]))
        scaler.scale((out.double() * data((4, 3), day)).sum().float()).backward()
        table.weight.grad = table.weight.grad * factor
        scaler.step(optimizer, max_norm=0.0625 if day == 3 else None)
        scaler.update()
        book.line(factor)
    book.close(table, optimizer)


class Asks(torch.optim.SGD):
    """An optimizer of the older kind, which is handed the scaler and asks it."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        bad = grad_scaler._check_inf_per_device(self)
        assert not any(float(b) for b in bad.values())
        scale = float(grad_scaler._get_scale_async())
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] / scale)


@story("an optimizer that asks the scaler", PATHS)
def asks(book, path):
    net = Net()
    optimizer = Asks(net.parameters(), lr=LR)
    book.scaler(path, True, rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, 0.5, BIG, "nan loss", 1.0)):
        book.step(net, optimizer, what, day, max_norm=0.03125 if day == 1 else None)
    book.close(net, optimizer)


# Several optimizers, several losses


@story("two optimizers", ("each", "all"), ("plain", "fused"), PATHS)
def two_optimizers(book, skip, how, path):
    nets = [Net(0), Net(1)]
    optimizers = [optimizer_of("AdamW", how, net.parameters()) for net in nets]
    rule = "dynamic:growth_interval=2"
    scaler = book.scaler(path, True, rule=rule, skip=skip, names=nn.ModuleList(nets))
    days = [
        (1.0, 1.0),
        (1.0, BIG),
        ("nan loss", 1.0),
        ("nan loss", "nan loss"),
        ("no gradients", 1.0),
        ("no gradients", "inf"),
        (1.0, 1.0),
    ]
    for day, both in enumerate(days):
        for net, optimizer, what in zip(nets, optimizers, both):
            optimizer.zero_grad()
            backward(scaler, net, what, day)
        for optimizer, what in zip(optimizers, both):
            scaler.step(optimizer, max_norm=0.0625 if day == 6 else None)
            if skip == "each":
                book.line(what)
        scaler.update()
        book.line(both)
    book.close(nets, optimizers)


@story("keys", RULES, ("plain", "fused"), PATHS)
def keys(book, rule, how, path):
    nets = {"g": Net(0), "d": Net(1)}
    optimizers = {key: optimizer_of("AdamW", how, net.parameters()) for key, net in nets.items()}
    settings = {"rule": RULES[rule], "names": nn.ModuleDict(nets)}
    scaler = book.scaler(path, True, **settings)
    days = [(1.0, 0.5), (1.0, BIG), ("nan loss", 1.0), (1.0, "no gradients"), (0.5, "inf")]
    for day, both in enumerate(days):
        for key, what in zip(nets, both):
            optimizers[key].zero_grad()
            backward(scaler, nets[key], what, day, key=key)
            if day == 3:
                scaler.clip_grad_norm_(optimizers[key], 0.0625, key=key)
            scaler.step(optimizers[key], key=key)
            book.line(what, key=key)
        scaler.update()
        book.line(both, scales=[scaler.get_scale(key) for key in (*nets, None)])
    saved = json.loads(json.dumps(scaler.state_dict()))
    other = book.scaler(path, **settings)
    other.load_state_dict(saved)
    book.note("loaded", [other.get_scale(key) for key in (*nets, None)])
    book.close(list(nets.values()), list(optimizers.values()))


# Micro-batches

SECOND_BAD = {
    "gradient": (1.0, BIG, 0.5, 1.0),
    "loss": (1.0, "inf loss", 0.5, 1.0),
    "both": (1.0, "nan loss", 0.5, 1.0),
    "gradient, then loss": (1.0, BIG, "nan loss", 1.0),
    "all gradients": (BIG, BIG, BIG, BIG),
    "all losses": ("nan loss",) * 4,
    "all, mixed": (BIG, "nan loss", BIG, "nan loss"),
}


@story(
    "micro-batches", SECOND_BAD, ("no window", "keep all", "drop bad"), ("plain", "fused"), PATHS
)
def micro_batches(book, bad, window, how, path):
    net = Net()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    scaler = book.scaler(path, True, rule="dynamic:growth_interval=2", names=net)
    good = (0.5, 0.25, 0.5, 1.0)
    for day, whats in enumerate((good, SECOND_BAD[bad], good, ("no gradients",) * 4, good)):
        optimizer.zero_grad()
        seen = {}
        with contextlib.ExitStack() as stack:
            if window != "no window":
                batches = stack.enter_context(scaler.accumulate(drop_bad=window == "drop bad"))
            for i, what in enumerate(whats):
                backward(scaler, net, what, 4 * day + i)
        if window != "no window":
            seen = {"kept": batches.kept, "dropped": batches.dropped}
        scaler.step(optimizer, max_norm=0.0625 if day == 4 else None)
        scaler.update()
        book.line(whats, **seen)
    book.close(net, optimizer)


# Gradients by hand


def torch_clips(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(net.parameters(), 0.03125)


def edited(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    net.below.grad.mul_(0.5)
    net.above.grad[0] = 2.0


def replaced(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    net.below.grad = net.below.grad * 2
    net.tail.grad = None
    return nn.utils.clip_grad_norm_(net.parameters(), 0.0625)


def replaced_badly(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    net.above.grad = torch.full_like(net.above, math.inf)


def edited_badly(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    net.above.grad.fill_(math.nan)


def exchanged_before(scaler, net, optimizer):
    """Looked at, then exchanged while still scaled."""
    norm = scaler.clip_grad_norm_(optimizer, 0.0625)
    net.below.grad = net.below.grad * 0.5
    return norm


def scaler_clips(scaler, net, optimizer):
    return scaler.clip_grad_norm_(optimizer, 0.03125)


def scaler_clips_twice(scaler, net, optimizer):
    scaler.clip_grad_norm_(optimizer, 0.03125)
    return scaler.clip_grad_norm_(optimizer, 0.0625)


def unscaled_then_clips(scaler, net, optimizer):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    return scaler.clip_grad_norm_(optimizer, 0.03125)


def clips_then_unscaled(scaler, net, optimizer):
    norm = scaler.clip_grad_norm_(optimizer, 0.03125)
    scaler.unscale_(optimizer)
    return norm


BY_HAND = {
    f.__name__.replace("_", " "): f
    for f in (
        torch_clips,
        edited,
        replaced,
        replaced_badly,
        edited_badly,
        exchanged_before,
        scaler_clips,
        scaler_clips_twice,
        unscaled_then_clips,
        clips_then_unscaled,
    )
}


@story("by hand", BY_HAND, HOW, PATHS)
def by_hand(book, what_is_done, how, path):
    net = Net()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    journal = what_is_done in ("torch clips", "scaler clips")
    scaler = book.scaler(path, journal, rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, 0.5, BIG, "nan loss", 1.0)):
        optimizer.zero_grad()
        backward(scaler, net, what, day)
        norm = BY_HAND[what_is_done](scaler, net, optimizer)
        before = {n: digest(p.grad) for n, p in net.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
        told = {} if norm is None else {"told_norm": float(norm).hex()}
        book.line(what, **told, **({"grads": before} if day == 0 else {}))
    optimizer.zero_grad()
    backward(scaler, net, 1.0, 9)
    scaler.unscale_(optimizer)  # and no step
    scaler.update()
    book.line("unscaled only")
    book.close(net, optimizer)


@story("no gradients are clipped", HOW, PATHS)
def nothing_to_clip(book, how, path):
    net = Net()
    optimizer = optimizer_of("SGD", how, net.parameters())
    scaler = book.scaler(path, True, rule="auto", names=net)
    for what in ("no gradients", 1.0, "no gradients"):
        optimizer.zero_grad()
        backward(scaler, net, what, 0)
        norm = scaler.clip_grad_norm_(optimizer, 0.0625)
        scaler.step(optimizer)
        scaler.update()
        book.line(what, told_norm=float(norm).hex())
    book.close(net, optimizer)


# Closures


@story("LBFGS", ("no search", "strong_wolfe"), (None, 0.5), PATHS)
def lbfgs(book, search, max_norm, path):
    w = nn.Parameter(torch.tensor([-1.0, 1.5]))
    how = None if search == "no search" else search
    optimizer = torch.optim.LBFGS([w], lr=0.0625, max_iter=3, line_search_fn=how)
    scaler = book.scaler(path, True, rule="dynamic:init_scale=2^10,growth_interval=2")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (1 - w[0]) ** 2 + 16 * (w[1] - w[0] ** 2) ** 2
        scaler.scale(loss * math.nan if calls == 11 else loss).backward()
        if calls in (5, 6):
            w.grad[0] = math.inf
        return loss

    for day in range(8):
        value = scaler.step(optimizer, closure, max_norm=max_norm)
        scaler.update()
        told = None if value is None else value.item().hex()
        book.line(day, calls=calls, value=told, w=[x.hex() for x in w.tolist()])
    book.close((), optimizer)


# Master weights

KINDS = {
    "fp16/masters": (torch.float16, "masters"),
    "bf16/masters": (torch.bfloat16, "masters"),
    "bf16/split": (torch.bfloat16, "split"),
    "bf16/stochastic": (torch.bfloat16, "stochastic"),
}
OWN = {"default": {}, "plain": HOW["plain"], "foreach": HOW["foreach"]}


def master_of(kind, net, name="AdamW", how="default"):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    inner = getattr(torch.optim, name)
    update = KINDS[kind][1]
    return MasterWeights(inner, net.parameters(), update=update, lr=LR, **OWN[how], **settings)


def master_week(book, net, optimizer):
    """Frozen and missing gradients, clipping, overflows, gradients edited on the masters."""
    scaler, _ = book.scalers[-1]
    days = (1.0, 0.5, BIG, "nan loss", "inf", 0.5, 1.0, "no gradients", 0.25, 0.5)
    for day, what in enumerate(days):
        if day == 5:
            net.late.requires_grad_(True)
        optimizer.zero_grad()
        backward(scaler, net, what, day)
        if day == 6:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(optimizer.masters, 0.03125)
        elif day == 8:
            norm = scaler.clip_grad_norm_(optimizer, 0.03125)
        else:
            norm = math.nan
        scaler.step(optimizer, max_norm=0.0625 if day == 1 else None)
        scaler.update()
        book.line(what, told_norm=float(norm).hex())
    book.note("masters", [digest(m) for m in optimizer.masters])


@story("masters", KINDS, ("SGD", "AdamW"), OWN, PATHS)
def masters(book, kind, name, how, path):
    net = Patchy(KINDS[kind][0])
    optimizer = master_of(kind, net, name, how)
    book.scaler(path, True, rule="dynamic:growth_interval=2", names=net)
    master_week(book, net, optimizer)
    book.close(net, optimizer)


@story("masters with auto", KINDS, PATHS)
def masters_auto(book, kind, path):
    net = Patchy(KINDS[kind][0])
    optimizer = master_of(kind, net)
    book.scaler(path, True, rule="auto", names=net)
    master_week(book, net, optimizer)
    book.close(net, optimizer)


@story("masters of any optimizer", ("Adafactor", "Muon"), PATHS)
def masters_any(book, name, path):
    """Those that are given every parameter in its shape."""
    net = Patchy(torch.bfloat16)
    params = [net.below, net.seldom] if name == "Muon" else list(net.parameters())
    optimizer = MasterWeights(getattr(torch.optim, name), params, lr=LR)
    book.scaler(path, rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, 0.5, BIG, 0.5, "nan loss", 1.0)):
        net.zero_grad()
        book.step(net, optimizer, what, day, max_norm=0.0625 if day == 3 else None)
    book.close(net, optimizer)


@story("masters of LBFGS", PATHS)
def masters_lbfgs(book, path):
    w = nn.Parameter(torch.tensor([-1.0, 1.5], dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.LBFGS, [w], lr=0.0625, max_iter=3)
    scaler = book.scaler(path, rule="dynamic:init_scale=2^10,growth_interval=2")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        v = w.float()
        loss = (1 - v[0]) ** 2 + 16 * (v[1] - v[0] ** 2) ** 2
        scaler.scale(loss).backward()
        if calls == 5:
            w.grad[0] = math.inf
        return loss

    for day in range(5):
        scaler.step(optimizer, closure)
        scaler.update()
        book.line(day, calls=calls, w=w.tolist(), masters=[m.tolist() for m in optimizer.masters])
    book.close((), optimizer)


@story("masters, saved and loaded", KINDS, ("state", "copy", "pickle"))
def masters_saved(book, kind, how):
    net = Patchy(KINDS[kind][0])
    optimizer = master_of(kind, net)
    book.scaler("host", rule="dynamic:growth_interval=2")
    for day, what in enumerate((1.0, BIG, 0.5)):
        book.step(net, optimizer, what, day)
    if how == "state":
        again = Patchy(KINDS[kind][0])
        again.load_state_dict(net.state_dict())
        other = master_of(kind, again, how="foreach")
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "copy":
        again, other = copy.deepcopy((net, optimizer))
    else:
        again, other = pickle.loads(pickle.dumps((net, optimizer)))
    for day, what in enumerate((0.5, 1.0, BIG, 0.25), 3):
        book.step(again, other, what, day)
    book.note("masters", [digest(m) for m in other.masters])
    other.refresh([m.detach().float() * 2 for m in other.masters])
    book.note("refreshed", [digest(m) for m in other.masters])
    book.close([net, again], [optimizer, other])


@story("masters, taken over")
def masters_taken_over(book):
    net = Patchy(torch.bfloat16)
    inner = torch.optim.AdamW([net.below, net.above], lr=LR)
    net(0).backward()
    inner.step()
    optimizer = MasterWeights(inner)
    book.scaler("host", rule="dynamic:growth_interval=2")
    for day, what in enumerate((1.0, BIG, 0.5)):
        net.zero_grad()
        book.step(net, optimizer, what, day)
        if day == 0:
            optimizer.add_param_group({"params": [net.tail, net.seldom], "lr": LR / 2})
    book.close(net, optimizer)


@story("masters, refused")
def masters_refused(book):
    half = Patchy(torch.float16)
    for update in ("split", "stochastic"):
        with book.caught(update):
            MasterWeights(torch.optim.SGD, half.parameters(), update=update, lr=LR)
    scaler = book.scaler("host", names=half)
    optimizer = torch.optim.SGD(half.parameters(), lr=LR)
    backward(scaler, half, 1.0 / 16, 0)
    with book.caught("float16 without masters"):
        scaler.step(optimizer)
    allowed = book.scaler("host", names=half, allow_fp16_params=True)
    half.zero_grad()
    backward(allowed, half, 1.0 / 16, 0)
    allowed.step(optimizer)
    allowed.update()
    book.line("allowed")
    book.close(half, optimizer)


@story("half model", (torch.float16, torch.bfloat16))
def halved(book, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model = half_model(model, dtype)
    book.note("weights", {n: digest(p) for n, p in model.named_parameters()})
    book.close()


# A loss in float16


@story("float16 loss", ("dynamic", "auto"), ("plain", "fused"), PATHS)
def float16_loss(book, rule, how, path):
    w = nn.Parameter(torch.ones(1))
    optimizer = optimizer_of("AdamW", how, [w])
    scaler = book.scaler(path, True, rule=RULES[rule])
    for x in (2.0, 1.0, 0.5, 2.0**14, 1.0, 1.0):
        optimizer.zero_grad()
        scaled = scaler.scale((w * x).half())
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        book.line(x, scaled=[str(scaled.dtype), scaled.item()], w=w.item())
    book.close((), optimizer)


# Limits

FLOOR = {"hold": {}, "warn": {"on_floor": "warn"}, "raise": {"on_floor": "raise"}}
LIMITS = {**FLOOR, "two skips": {"max_consecutive_skips": 2}}


@story("limits", LIMITS, ("overflow", "loss", "gradient"), ("plain", "fused"), PATHS)
def limits(book, limit, why, how, path):
    net = Net()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    rule = "dynamic:init_scale=2^2,min_scale=2^1,growth_interval=2"
    scaler = book.scaler(path, True, rule=rule, names=net, **LIMITS[limit])
    bad = {"overflow": BIG * 16, "loss": "nan loss", "gradient": "nan"}[why]
    for day, what in enumerate((1.0, bad, bad, bad, bad, 1.0)):
        with book.caught(f"day {day}"):
            optimizer.zero_grad()
            backward(scaler, net, what, day)
            scaler.step(optimizer)
            scaler.update()
        book.line(what)
    with book.caught("flush"):
        scaler.flush()
    book.close(net, optimizer)


@story("limits with hysteresis", PATHS)
def limits_with_hysteresis(book, path):
    net = Net()
    optimizer = optimizer_of("SGD", "fused", net.parameters())
    rule = "megatron:init_scale=2,growth_interval=2"
    book.scaler(path, True, rule=rule, names=net, on_floor="raise")
    for day, what in enumerate((1.0, "inf", "inf", "inf", "inf", 1.0)):
        with book.caught(f"day {day}"):
            book.step(net, optimizer, what, day)
    with book.caught("flush"):
        book.scalers[-1][0].flush()
    book.close(net, optimizer)


# Whole steps, with retries

WEEKS = {  # rule, retries, factors
    "down": ("dynamic:init_scale=2^24", 8, (1.0, 1.0, 2.0**8, 1.0)),
    "down, too few": ("dynamic:init_scale=2^24", 2, (1.0, 1.0, 1.0, BIG)),
    "up": ("auto:init_scale=1", 4, (1.0, 2.0**-8, 2.0**8, 1.0, "nan loss", 1.0)),
    "up, one try": ("auto:init_scale=1", 1, (1.0, 2.0**-8, 2.0**8, 1.0)),
    "up and back": ("auto:init_scale=2^-10", 2, (2.0**-12, 2.0**12, 2.0**-12, 1.0)),
    "from above": ("auto:init_scale=2^40", 8, (1.0, 1.0, BIG, 1.0)),
    "static": ("static:4096", 3, (1.0, BIG, 1.0)),
    "no retries": ("auto", 0, (1.0, BIG, 1.0)),
}


@story("retries", WEEKS, ("plain", "fused"), PATHS)
def retries(book, week, how, path):
    rule, most, factors = WEEKS[week]
    net = Noisy()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = book.scaler(path, True, rule=rule, names=net)
    for day, what in enumerate(factors):

        def closure(day=day, what=what):
            if what == "nan loss":
                return net(day) * math.nan, net(day + 20)
            return net(day, what), net(day + 20, what)

        result = scaler.train_step(
            closure,
            optimizer,
            retries=most,
            model=net if most else None,
            scheduler=schedule,
            max_norm=0.0625 if day == 1 else None,
        )
        assert result is scaler.result
        cleared = all(p.grad is None for p in net.parameters())
        book.line(what, calls=float(net.calls), cleared=cleared)
    book.note("random", torch.rand(3).tolist())
    book.close(net, optimizer)


@story("the last try", range(7), PATHS)
def last_try(book, most, path):
    """Activation gradients far above those of the weights: a higher scale is tried and given up."""
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=LR)
    scaler = book.scaler(path, True, rule="auto")

    def closure():
        return ((w.half() * torch.full((4,), 6e-6).half()).float() * 0.5).sum()

    for day in range(3):
        scaler.train_step(closure, optimizer, retries=most, model=False)
        book.line(day, w=[x.hex() for x in w.tolist()])
    book.close((), optimizer)


@story("calibrate", ("dynamic:init_scale=2^30", "auto:init_scale=2^32", "auto:init_scale=1"), PATHS)
def calibrated(book, rule, path):
    net = Noisy()
    optimizer = optimizer_of("AdamW", "fused", net.parameters())
    scaler = book.scaler(path, True, rule=rule, names=net)
    book.note("found", scaler.calibrate(lambda: net(0), model=net))
    book.note("calls", float(net.calls))
    for day in range(2):
        book.step(net, optimizer, 1.0, day)
    book.close(net, optimizer)


@story("find_scale")
def scale_found(book):
    net = Noisy()
    found = find_scale(net, range(6), lambda net, batch: net(batch, 2.0**-12))
    book.note("found", str(found))
    book.note("calls", float(net.calls))
    book.close(net)


# Checkpoints


@story("saved in the middle", RULES, ("plain", "fused"), PATHS, PATHS)
def saved(book, rule, how, path, then):
    net = Net()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    scaler = book.scaler(path, rule=RULES[rule], names=net)
    for day, what in enumerate(DAYS[:6]):
        book.step(net, optimizer, what, day)
    state = json.loads(json.dumps(scaler.state_dict()))
    scaler = book.scaler(then, True, rule=RULES[rule], names=net)
    if then == "device":  # its state lies on the device already
        book.step(net, optimizer, 0.5, 5)
    scaler.load_state_dict(state)
    for day, what in enumerate(DAYS[6:], 6):
        book.step(net, optimizer, what, day)
    book.close(net, optimizer)


@story("loaded from torch", ("torch's rule", "dynamic", "auto"), PATHS)
def loaded_from_torch(book, rule, path):
    net = Net()
    optimizer = optimizer_of("AdamW", "foreach", net.parameters())
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=3)
    for day, what in enumerate((1.0, BIG, 0.5, 0.25)):
        optimizer.zero_grad()
        backward(Unkeyed(theirs), net, what, day)
        theirs.step(optimizer)
        theirs.update()
    settings = {} if rule == "torch's rule" else {"rule": RULES[rule]}
    scaler = book.scaler(path, names=net, **settings)
    scaler.load_state_dict(theirs.state_dict())
    book.note("loaded", theirs.state_dict())
    book.note("tracker", scaler._get_growth_tracker())
    for day, what in enumerate((1.0, 0.5, BIG, 0.5), 4):
        book.step(net, optimizer, what, day)
    back = torch.amp.GradScaler("cpu")
    ours = scaler.state_dict()
    back.load_state_dict({k: v for k, v in ours.items() if k != "gradlift"})
    book.note("back", back.state_dict())
    book.close(net, optimizer)


class Unkeyed:
    """torch's scaler, called as ours."""

    def __init__(self, scaler):
        self.scaler = scaler

    def scale(self, loss, key=None):
        return self.scaler.scale(loss)


@story("copied", ("copy", "pickle"), PATHS)
def copied(book, how, path):
    net = Net()
    optimizer = optimizer_of("SGD", "fused", net.parameters())
    scaler = book.scaler(path, rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, BIG, 0.5)):
        book.step(net, optimizer, what, day)
    other = copy.deepcopy(scaler) if how == "copy" else pickle.loads(pickle.dumps(scaler))
    book.scalers.append((other, None))
    for day, what in enumerate((0.5, 1.0, BIG), 3):
        book.step(net, optimizer, what, day)
    book.close(net, optimizer)


@story("damaged states")
def damaged(book):
    net = Net()
    optimizer = optimizer_of("SGD", "foreach", net.parameters())
    scaler = book.scaler("host", rule="dynamic:growth_interval=2", names=net)
    for day, what in enumerate((1.0, BIG)):
        book.step(net, optimizer, what, day)
    good = scaler.state_dict()
    own = good["gradlift"]
    damages = {
        "empty": {},
        "list": [],
        "no scale": {k: v for k, v in good.items() if k != "scale"},
        "text": {**good, "scale": "much"},
        "nan": {**good, "scale": math.nan},
        "negative": {**good, "scale": -1.0},
        "tracker": {**good, "_growth_tracker": -1},
        "factor": {**good, "growth_factor": math.inf},
        "schema": {**good, "gradlift": {**own, "schema": 99}},
        "rule": {**good, "gradlift": {**own, "rule": "headroom"}},
        "keys": {**good, "gradlift": {**own, "keys": "["}},
        "key": {**good, "gradlift": {**own, "keys": '{"a": 3}'}},
        "events": {**good, "gradlift": {**own, "events": "[3]"}},
        "steps": {**good, "gradlift": {**own, "steps": -1}},
    }
    for name, damage in damages.items():
        with book.caught(name):
            scaler.load_state_dict(damage)
    book.close(net, optimizer)


@story("misuse", PATHS)
def misuse(book, path):
    net = Net()
    optimizer = optimizer_of("SGD", "foreach", net.parameters())

    def fresh(**settings):
        optimizer.zero_grad()
        scaler = forced(GradScaler("cpu", init_scale=2.0**10, **settings), path)
        backward(scaler, net, 1.0, 0)
        return scaler

    scaler = fresh()
    scaler.step(optimizer)
    with book.caught("step twice"):
        scaler.step(optimizer)
    with book.caught("unscale after step"):
        scaler.unscale_(optimizer)
    with book.caught("copy in a window"):
        copy.deepcopy(scaler)
    scaler = fresh()
    scaler.unscale_(optimizer)
    backward(scaler, net, 1.0, 1)
    with book.caught("scale after unscale"):
        scaler.step(optimizer)
    for name, settings in {
        "skip": {"skip": "some"},
        "floor": {"on_floor": "explode"},
        "skips": {"max_consecutive_skips": 0},
        "sharded": {"sharded": 3},
        "rule and scale": {"rule": "auto", "growth_interval": 3},
        "growth": {"growth_factor": 0.5},
        "backoff": {"backoff_factor": 2.0},
        "init": {"init_scale": -1.0},
    }.items():
        with book.caught(name):
            GradScaler("cpu", **settings)
    scaler = fresh()
    calls = {
        "integer loss": lambda: scaler.scale(torch.tensor(3)),
        "no tensor": lambda: scaler.scale(3.0),
        "no optimizer": lambda: scaler.step(net),
        "max_norm": lambda: scaler.step(optimizer, max_norm=0.0),
        "new_scale": lambda: scaler.update(new_scale=math.inf),
        "retries": lambda: scaler.train_step(lambda: net(0), optimizer, retries=1),
        "lbfgs": lambda: scaler.train_step(
            lambda: net(0), torch.optim.LBFGS(net.parameters(), lr=LR)
        ),
        "no closure": lambda: fresh(skip="all").step(
            torch.optim.LBFGS(net.parameters(), lr=LR), lambda: net(0)
        ),
        "drop_bad, sharded": lambda: fresh(sharded=True).accumulate(drop_bad=True).__enter__(),
        "factor of auto": lambda: GradScaler("cpu", rule="auto").set_growth_factor(4.0),
    }
    for name, call in calls.items():
        with book.caught(name):
            call()
    sparse = nn.Parameter(data((4, 2), 0))
    sparse.grad = torch.eye(4)[:, :2].to_sparse()
    with book.caught("sparse"):
        fresh().step(MasterWeights(torch.optim.SGD, [sparse], lr=LR))
    book.close(net, optimizer)


# Inside the network


class Layer(nn.Module):
    """Times a weight, in float16."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(data((4,), seed))

    def forward(self, x):
        return (x.half() * self.weight.half()).float() if self.weight.dim() else x


class HalfLayer(Layer):
    """Its output stays float16, as under autocast."""

    def forward(self, x):
        return x.half() * self.weight.half()


def deep(layer=HalfLayer):
    return nn.Sequential(layer(1), layer(2), layer(3))


def deep_loss(net, day, factor):
    return (net(data((3, 4), day)).double().sum() * (factor / 16)).float()


INSIDE = (1.0, 0.5, BIG, 1.0, "nan loss", 0.25, 0.5, 1.0)


def inside_week(book, net, optimizer, watched):
    scaler, _ = book.scalers[-1]
    for day, what in enumerate(INSIDE):
        optimizer.zero_grad()
        loss = deep_loss(net, day, what if isinstance(what, float) else 1.0)
        scaler.scale(loss * math.nan if what == "nan loss" else loss).backward()
        scaler.step(optimizer, max_norm=0.0625 if day == 5 else None)
        scaler.update()
        book.line(what, inside=watched())


@story("probe", ("dynamic", "auto"), ("plain", "fused"), PATHS)
def probed(book, rule, how, path):
    net = deep()
    optimizer = optimizer_of("AdamW", how, net.parameters())
    book.scaler(path, True, rule=RULES[rule], names=net, every=3)
    watcher = probe(net, every=2)
    inside_week(book, net, optimizer, lambda: None)
    book.note("seen", watcher.seen)
    watcher.remove()
    book.close(net, optimizer)


@story("probe and retries", PATHS)
def probed_retries(book, path):
    net = deep()
    optimizer = optimizer_of("AdamW", "fused", net.parameters())
    scaler = book.scaler(path, True, rule="auto:init_scale=1", names=net)
    watcher = probe(net, every=2)
    for day, factor in enumerate((1.0, 0.5, BIG, 1.0)):
        scaler.train_step(
            lambda day=day, factor=factor: deep_loss(net, day, factor),
            optimizer,
            retries=4,
            model=net,
        )
        book.line(factor)
    book.note("seen", watcher.seen)
    watcher.remove()
    book.close(net, optimizer)


@story("layerwise", ("dynamic", "auto"), ("plain", "fused"), PATHS)
def lifted(book, rule, how, path):
    net = deep()
    with torch.no_grad():
        net[1].weight.mul_(2.0**-9)  # below it gradients are much smaller
    optimizer = optimizer_of("AdamW", how, net.parameters())
    book.scaler(path, True, rule=RULES[rule], names=net)
    lifts = layerwise(net, every=2)
    inside_week(book, net, optimizer, lambda: lifts.lifts)
    book.note("state", lifts.state_dict())
    saved = json.loads(json.dumps(lifts.state_dict()))
    lifts.load_state_dict(saved)
    book.note("loaded", lifts.lifts)
    lifts.remove()
    book.close(net, optimizer)


@story("autocast", ("layerwise", "probe"), PATHS)
def autocast(book, kind, path):
    """Ordinary layers. Not both at once: which of the two tells the journal last is chance."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(data(tuple(p.shape), i))
    optimizer = optimizer_of("AdamW", "fused", net.parameters())
    scaler = book.scaler(path, True, rule="auto", names=net)
    if kind == "probe":
        watcher = probe(net, every=2)
    else:
        watcher = layerwise(net, ["0", "2"], every=2)
    for day, factor in enumerate((1.0, 0.5, BIG, 1.0, 0.5)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = net(data((3, 4), day))
        scaler.scale(out.float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        book.line(factor, lifts=getattr(watcher, "lifts", None))
    watcher.remove()
    book.close(net, optimizer)


# apex


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(data(tuple(p.shape), 10 + i))

    def forward(self, x):
        return self.two(self.one(x))


LEVELS = ("O0", "O1", "O2", "O3")


@story("apex", LEVELS, ("SGD", "AdamW"), ("one block", "two blocks", "delayed", "clipped"))
def apex(book, level, name, how):
    said = io.StringIO()
    where = book.folder / "apex.jsonl"
    scale = {} if level in ("O1", "O2") else {"loss_scale": 64.0}
    with contextlib.redirect_stdout(said):
        model = Weighted()
        optimizer = optimizer_of(name, "foreach", model.parameters())
        if (level, name) == ("O3", "AdamW"):  # 1e-8 is 0 in float16, which is refused
            optimizer.param_groups[0]["eps"] = 2.0**-14
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, max_loss_scale=2.0**17, journal=where, **scale
        )
        blocks = 1 if how in ("one block", "clipped") else 2
        for day, factor in enumerate((2.0**-4, 2.0**-3, 2.0**30, "nan", 2.0**-4, 2.0**-5)):
            optimizer.zero_grad()
            for i in range(blocks):
                loss = model(data((3, 4), 2 * day + i)).float().mean()
                loss = loss * (math.nan if factor == "nan" else factor)
                delay = how == "delayed" and i == 0
                with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                    scaled_loss.backward()
            norm = math.nan
            if how == "clipped":
                norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.0625)
            optimizer.step()
            weights = [digest(p) for p in model.parameters()]
            masters = [digest(p) for p in amp.master_params(optimizer)]
            book.told["steps"].append(
                {
                    "what": factor,
                    "norm": float(norm).hex(),
                    "state": amp.state_dict(),
                    "weights": weights,
                    "masters": masters,
                }
            )
    book.note("said", said.getvalue().splitlines())
    book.note("journal", journal_of(where))
    book.close(model, optimizer)
    amp.initialize(nn.Linear(1, 1), enabled=False)


@story("apex, two losses", LEVELS[:3])
def apex_two(book, level):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        models = [Weighted(), Weighted()]
        optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in models]
        models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=2)
        for day, factors in enumerate(((1.0, 0.5), (2.0**30, 1.0), (1.0, math.nan), (1.0, 1.0))):
            for i, factor in enumerate(factors):
                optimizers[i].zero_grad()
                loss = models[i](data((3, 4), day)).float().mean() * (factor / 16)
                with amp.scale_loss(loss, optimizers[i], loss_id=i) as scaled_loss:
                    scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            book.told["steps"].append({"what": factors, "state": amp.state_dict()})
    book.note("said", said.getvalue().splitlines())
    book.close(models, optimizers)
    amp.initialize(nn.Linear(1, 1), enabled=False)


def main():
    """With --write, records all anew; else only says how long each story takes."""
    spent, told = {}, {}
    for name, run in STORIES.items():
        begun = time.perf_counter()
        told[name] = run()
        spent[name] = time.perf_counter() - begun
    tapes = {name: run() for name, run in golden_tapes.TAPES.items()}
    for name in sorted(spent, key=spent.__getitem__)[-5:]:
        print(f"{spent[name]:.2f} s  {name}")
    print(f"{len(STORIES)} stories in {sum(spent.values()):.1f} s, {len(tapes)} tapes")
    if "--write" in sys.argv[1:]:
        write("stories.json", told)
        write("tapes.json", tapes)


if __name__ == "__main__":
    main()

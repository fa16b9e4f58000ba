"""Checks that a device does what the CPU does: each returns nothing, or names what differed."""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rules
from ..journal import Journal, Step, read_journal
from ..reading import Reading
from ..rules import ScaleState
from ..torch.masters.master_weights import MasterWeights
from .story import (
    CPU,
    FUSED,
    HUGE,
    PLAIN,
    RULES,
    STORY,
    NotApplicable,
    Setup,
    both,
    close,
    optimizer_of,
    same,
    scaler_on,
)


class Outcome(NamedTuple):
    name: str
    held: bool | None
    """None: not applicable."""
    reason: str
    seconds: float


def outcomes(device: torch.device) -> Iterator[Outcome]:
    """Runs every check, one after another."""
    for name, check in CHECKS.items():
        start, reason = time.perf_counter(), ""
        held: bool | None = True
        try:
            check(device)
        except NotApplicable as error:
            held, reason = None, str(error)
        except AssertionError as error:
            held, reason = False, str(error) or "an assertion without words"
        except Exception as error:  # an op that the device lacks is a finding, not a crash
            first = (str(error).splitlines() or [""])[0]
            held, reason = False, f"{type(error).__name__}: {first.split('. ')[0]}"
        yield Outcome(name, held, reason, time.perf_counter() - start)


def _story(device: torch.device, *, name: str, fused: bool) -> None:
    for rule in RULES:
        make = partial(optimizer_of, name, fused)
        here, there = Setup(device, make, rule=rule), Setup(CPU, make, rule=rule, reference=True)
        for i, what in enumerate(STORY):
            same(f"rule {rule}, step {i} ({what})", here.step(what), there.step(what))
            for p, q in zip(here.net.parameters(), there.net.parameters(), strict=True):
                close(f"rule {rule}, weights after step {i} ({what})", p, q)


def _culprits(device: torch.device) -> None:
    here = Setup(device, PLAIN)
    here.backward(1.0)
    for p, bad in ((here.net.below, math.inf), (here.net.above, math.nan)):
        assert p.grad is not None
        p.grad.view(-1)[-1] = bad
    named = [getattr(c, "described", c) for c in here.finish().culprits]
    same("culprits", named, ["above (nan)", "below (inf)"])


def _clipping(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(300, 500, device=device))
    x = torch.randn(300, 500, generator=generator)
    exact = x.double().norm().item()
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = scaler_on(device)
    scaler.scale((p * x.to(device)).sum()).backward()
    close("norm", scaler.clip_grad_norm_(optimizer, 1.0), torch.tensor(exact))
    scaler.step(optimizer)
    scaler.update()
    close("length of the clipped step", p.detach().cpu().double().norm(), torch.tensor(1.0))


def _waits(device: torch.device, *, records: bool) -> None:
    if device.type != "cuda":
        raise NotApplicable(f"torch can tell who waits on cuda only, not on {device.type}")
    guarded_steps(device, _no_waiting, records)


def guarded_steps(
    device: torch.device, guard: Callable[[], AbstractContextManager[None]], records: bool
) -> None:
    """Three steps as they come, then three under a guard; what is not gradlift's is outside it."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "run.jsonl") if records else None
        here = Setup(device, FUSED, journal=journal)
        for i in range(6):
            guarded = guard if i > 2 else nullcontext
            here.optimizer.zero_grad()
            loss = here.net(1.0)
            with guarded():
                scaled = here.scaler.scale(loss)
            scaled.backward()
            with guarded():
                here.scaler.step(here.optimizer, max_norm=1.0)
                here.scaler.update()
        if journal is not None:
            journal.close()


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# 16-bit weights


def _masters(device: torch.device, *, dtype: torch.dtype, update: str) -> None:
    """64 steps of 2^-14, each too small for a 16-bit weight of 1, are together 2^-8."""
    scale, huge = (2.0**10, 2.0**10) if dtype is torch.float16 else (2.0**20, 2.0**110)
    runs: list[Tensor] = []
    for where in (device, CPU):
        p = torch.nn.Parameter(torch.ones(4096, dtype=dtype, device=where))
        optimizer = MasterWeights(torch.optim.SGD, [p], lr=2.0**-14, update=update)
        scaler = scaler_on(where, reference=bool(runs), init_scale=scale, names={"p": p})
        for i in range(65):
            optimizer.zero_grad()
            scaler.scale((p * (huge if i == 9 else 1.0)).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        same("skipped, scale", (scaler.skipped_steps, scaler.get_scale()), (1, scale / 2))
        runs.append(p.detach().float().cpu())
    if update == "stochastic":
        off = (runs[0].mean() - (1 - 2.0**-8)).abs().item()
        assert off < 2.0**-12, f"mean of the weights is off by {off:.2g}"
    else:
        same("weights", runs[0].unique().tolist(), [1 - 2.0**-8])
    assert torch.equal(*runs), "weights differ from those on the CPU"


# State, retries, accumulation


def _state(device: torch.device) -> None:
    for rule in RULES:
        whole = Setup(device, PLAIN, rule=rule)
        expected = [whole.step(what) for what in STORY]
        here = Setup(device, PLAIN, rule=rule)
        for i, what in enumerate(STORY):
            if i == len(STORY) // 2:
                saved = json.loads(json.dumps(here.scaler.state_dict()))
                here.scaler = scaler_on(device, names=here.net, rule=rule)
                here.scaler.load_state_dict(saved)
            same(f"rule {rule}, step {i}, saved and loaded", here.step(what), expected[i])


def _retry(device: torch.device) -> None:
    seen = []
    for setup in both(device):
        closure = partial(setup.net, 2.0**118)
        result = setup.scaler.train_step(closure, setup.optimizer, retries=9, model=setup.net)
        events = [(e.what, e.step, e.detail["next_scale"]) for e in setup.scaler.events]
        seen.append((result.stepped, result.retries, result.scale, events))
    same("a retried step", *seen)
    same("stepped, retries, scale", seen[0][:3], (True, 7, 2.0**9))


def _accumulate(device: torch.device) -> None:
    seen = []
    for setup in both(device):
        with setup.scaler.accumulate(drop_bad=True) as window:
            for factor in (1.0, HUGE, 2.0):
                setup.scaler.scale(setup.net(factor)).backward()
        assert setup.net.below.grad is not None
        kept = (setup.net.below.grad / 2.0**16).unique().tolist()
        stepped = setup.finish().stepped
        moved = setup.net.below.detach().unique().tolist()
        seen.append((window.dropped, kept, stepped, moved, setup.scaler.get_scale()))
    same("dropped, kept, stepped, weights, scale", *seen)
    same("dropped, kept, stepped", seen[0][:3], ([1], [3.0], True))


# Rules, journal


def _trace(steps: int = 40) -> Iterator[Reading]:
    """Readings with everything in them: tiny, huge, zero, unknown, NaN losses, empty steps."""
    rng = random.Random(0)
    for _ in range(steps):
        kind = rng.randrange(12)
        amax = (1 + rng.randrange(8) / 8) * 2.0 ** rng.randint(-30, 30)
        yield Reading(
            nonfinite=kind in (1, 4),
            amax={0: 0.0, 1: math.inf, 2: 2.0**-140, 3: math.nan}.get(kind, amax),
            loss_nonfinite=kind == 5,
            checked=kind != 6,
            probe_amax=amax if kind == 7 else math.nan,
        )


def _rules(device: torch.device) -> None:
    tensor = partial(torch.tensor, device=device)
    for name in rules.PRESETS:
        rule = rules.preset(name)
        state = rule.init()
        held = ScaleState(
            tensor(float(state.scale), dtype=torch.float32),
            *(tensor(int(x), dtype=torch.int32) for x in state[1:]),
        )
        for i, reading in enumerate(_trace()):
            state = rule.advance(state, reading)
            held = rule.advance(held, Reading(*map(tensor, reading)), torch)
            found = held.scale.item(), *(int(x) for x in held[1:])
            same(f"rule {name}, step {i} of a trace", found, tuple(state))


def _journal(device: torch.device) -> None:
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for reference in (False, True):
            path = Path(folder) / f"{reference}.jsonl"
            with Journal(path) as journal:
                where = CPU if reference else device
                setup = Setup(where, PLAIN, reference=reference, journal=journal)
                for i, what in enumerate(STORY):
                    setup.step(what, max_norm=1.0)
                    if not reference:
                        lines = len(read_journal(path).steps) if i else 0
                        assert lines == i, f"{lines} lines after {i + 1} steps, expected {i}"
                setup.scaler.flush()
            seen.append(read_journal(path).steps)
    same("lines after flush()", len(seen[0]), len(STORY))
    for got, expected in zip(*seen, strict=True):
        same(f"line of step {expected.step}", _exact(got), _exact(expected))
        for name in ("loss", "norm"):
            a, b = getattr(got, name), getattr(expected, name)
            if math.isfinite(a) or math.isfinite(b):
                close(f"{name} of step {expected.step}", torch.tensor(a), torch.tensor(b))


def _exact(step: Step) -> dict[str, str]:
    """What is the same to the bit, as text: NaN would equal nothing, and -0.0 may be 0.0."""
    names = "step", "scale", "next_scale", "nonfinite", "verdict", "cause", "culprits", "lr"
    values = {name: getattr(step, name) for name in names}
    if not step.nonfinite:  # of a tensor that is finite in part, a device knows no largest value
        values["amax"] = step.amax
    return {k: str(v + 0.0 if isinstance(v, float) else v) for k, v in values.items()}


CHECKS: dict[str, Callable[[torch.device], None]] = {
    **{
        f"scales, skips, causes: {name}{', fused' * fused}": partial(
            _story, name=name, fused=bool(fused)
        )
        for name in ("SGD", "AdamW")
        for fused in (0, 1)
    },
    "clipping: norm against float64": _clipping,
    "culprits named": _culprits,
    "nothing waits in a fused step": partial(_waits, records=False),
    "nothing waits while recording": partial(_waits, records=True),
    "float16 weights: masters": partial(_masters, dtype=torch.float16, update="masters"),
    **{
        f"bfloat16 weights: {update}": partial(_masters, dtype=torch.bfloat16, update=update)
        for update in ("masters", "split", "stochastic")
    },
    "state saved and loaded": _state,
    "retry of a batch": _retry,
    "accumulate, bad micro-batch dropped": _accumulate,
    "rules to the bit, every preset": _rules,
    "journal one step late, then whole": _journal,
}

"""JAX on the CPU: what a scaler adds to an optimizer step, beside jmp's, flax's and optax's own.

python benchmarks/jax_step.py [--rounds 15] [--quick] [--json out.json]

Set a: 100 leaves, 25.5M elements, float32; one jitted step from scaled gradients to new parameters.
All contenders run interleaved in one process; figures are medians and ratios to `optax.adamw`
(clipped: to `optax.chain(clip_by_global_norm, adamw)`). The second column of ratios is processor
time, which other work on the machine disturbs less. The second table is compile time by leaves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gradlift.jax as gl

SHAPE, LEAVES, MAX_NORM = (505, 505), 100, 1.0
ADAM = optax.adamw(1e-5)
CLIPPED = optax.chain(optax.clip_by_global_norm(MAX_NORM), ADAM)
Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # (params, state, gradients) -> (params, state)


@jax.custom_vjp
def given(params: Any, grads: Any) -> Any:
    """A loss with these gradients, scaled already: some want a function to differentiate."""
    return jnp.float32(1)


given.defvjp(
    lambda params, grads: (jnp.float32(1), grads),
    lambda grads, up: (grads, None),
)


def plain(optimizer: Any) -> tuple[Any, Step]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer.init, step


def wrapped(rule: str, max_norm: float | None = None) -> tuple[Any, Step]:
    tx = gl.wrap(ADAM, rule, max_norm=max_norm)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    return tx.init, step


def explicit(rule: str, max_norm: float | None = None) -> tuple[Any, Step]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        inner, scaler = state
        _, grads, scaler, result = gl.value_and_grad(given)(scaler, params, grads)
        params, inner = gl.apply(ADAM, grads, inner, params, result, max_norm=max_norm)
        return params, (inner, scaler)

    return lambda params: (ADAM.init(params), gl.Scaler(rule)), step


def with_jmp(optimizer: Any) -> tuple[Any, Step]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        inner, held = state
        scale = jmp.DynamicLossScale(*held)  # as itself it breaks in lower().compile()
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, moved = optimizer.update(grads, inner, params)
        new = optax.apply_updates(params, updates), moved
        params, inner = jmp.select_tree(finite, new, (params, inner))
        scale = scale.adjust(finite)
        return params, (inner, (scale.loss_scale, scale.counter))

    return lambda params: (optimizer.init(params), (jnp.float32(1), jnp.int32(0))), step


def with_flax(optimizer: Any) -> tuple[Any, Step]:
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        inner, scale = state
        scale, finite, _, grads = scale.value_and_grad(given)(params, grads)
        updates, moved = optimizer.update(grads, inner, params)
        new = optax.apply_updates(params, updates), moved
        params, inner = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, inner))
        return params, (inner, scale)

    start = DynamicScale(scale=jnp.float32(1), fin_steps=jnp.int32(0))
    return lambda params: (optimizer.init(params), start), step


AUTO = "headroom:init_scale=1,min_scale=1,max_scale=1"
ROWS: dict[bool, dict[str, tuple[Any, Step]]] = {
    False: {
        "optax.adamw": plain(ADAM),
        "gradlift wrap": wrapped("dynamic:init_scale=1"),
        "gradlift value_and_grad + apply": explicit("dynamic:init_scale=1"),
        "gradlift wrap, auto": wrapped(AUTO),
        "jmp": with_jmp(ADAM),
        "flax DynamicScale": with_flax(ADAM),
        "optax.apply_if_finite": plain(optax.apply_if_finite(ADAM, 10)),
    },
    True: {
        "optax clip + adamw": plain(CLIPPED),
        "gradlift wrap": wrapped("dynamic:init_scale=1", MAX_NORM),
        "gradlift value_and_grad + apply": explicit("dynamic:init_scale=1", MAX_NORM),
        "gradlift wrap, auto": wrapped(AUTO, MAX_NORM),
        "jmp": with_jmp(CLIPPED),
        "flax DynamicScale": with_flax(CLIPPED),
    },
}
GOALS = {False: 1.22, True: 1.06}  # of both routes; auto reads the gradients once more


def tree(leaves: int, shape: tuple[int, ...], random: bool) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), leaves)
    return {
        f"layer{i:03}": jax.random.normal(k, shape) if random else jnp.zeros(shape)
        for i, k in enumerate(keys)
    }


def compiled(row: tuple[Any, Step], params: Any, grads: Any, donate: bool) -> tuple[Any, float]:
    init, step = row
    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    start = time.perf_counter()
    ready = jitted.lower(params, init(params), grads).compile()
    return ready, time.perf_counter() - start


def measure(
    clip: bool, donate: bool, rounds: int, names: list[str], tick: Callable[[], None]
) -> dict[str, dict[str, float]]:
    grads = tree(LEAVES, SHAPE, random=True)
    shared = tree(LEAVES, SHAPE, random=False)
    runs, held, times, busy = {}, {}, {}, {}
    for name in names:
        row = ROWS[clip][name]
        runs[name], _ = compiled(row, shared, grads, donate)
        mine = jax.tree.map(jnp.copy, shared) if donate else shared
        held[name] = mine, row[0](mine)
        times[name], busy[name] = [], []
        tick()
    for i in range(rounds + 2):
        for name, run in runs.items():
            used, start = time.process_time(), time.perf_counter()
            out = jax.block_until_ready(run(*held[name], grads))
            if i > 1:
                times[name].append(time.perf_counter() - start)
                busy[name].append(time.process_time() - used)
            if donate:
                held[name] = out
            del out
        tick()
    base, base_busy = (statistics.median(d[names[0]]) for d in (times, busy))
    return {
        name: {
            "ms": statistics.median(times[name]) * 1e3,
            "ratio": statistics.median(times[name]) / base,
            "busy": statistics.median(busy[name]) / base_busy,
        }
        for name in names
    }


def compile_times(sizes: list[int], slow_up_to: int, tick: Callable[[], None]) -> list[Any]:
    found = []
    for leaves in sizes:
        params = tree(leaves, (32, 32), random=False)
        base = None
        for name in ("optax.adamw", "gradlift wrap", "gradlift value_and_grad + apply", "jmp"):
            if name == "jmp" and leaves > slow_up_to:
                continue
            _, seconds = compiled(ROWS[False][name], params, params, False)
            base = seconds if base is None else base
            found.append(
                {"leaves": leaves, "name": name, "seconds": seconds, "ratio": seconds / base}
            )
            tick()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds, no slow peers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    rounds = 5 if args.quick else args.rounds
    cases = [(clip, donate) for clip in (False, True) for donate in (False, True)]
    names = {
        clip: [
            n
            for n in ROWS[clip]
            if not args.quick or n.startswith(("optax.adamw", "optax clip", "gradlift"))
        ]
        for clip in ROWS
    }
    sizes = [50, 100, 200] if args.quick else [50, 100, 200, 500]
    slow_up_to = 0 if args.quick else 100  # jmp: a minute and a half at 200 leaves
    total = sum(rounds + 2 + len(names[clip]) for clip, _ in cases) + 4 * len(sizes)
    found = []
    # Drawn between the rounds only: a bar that refreshes itself is a thread beside the measurement.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("measuring", total=total)

        def tick() -> None:
            progress.advance(bar)
            progress.refresh()

        for clip, donate in cases:
            rows = measure(clip, donate, rounds, names[clip], tick)
            found.append({"clip": clip, "donated": donate, "rows": rows})
        compiling = compile_times(sizes, slow_up_to, tick)
    table = Table(box=box.SIMPLE_HEAD, title="CPU, AdamW, 100 leaves, 25.5M elements")
    for title in ("clip", "buffers", "contender", "ms", "ratio", "processor time", "goal"):
        table.add_column(title)
    for case in found:
        for i, (name, r) in enumerate(case["rows"].items()):
            ours = name.startswith("gradlift") and "auto" not in name
            table.add_row(
                "1.0" if case["clip"] else "-",
                "donated" if case["donated"] else "kept",
                name,
                f"{r['ms']:.1f}",
                f"{r['ratio']:.2f}" if i else "",
                f"{r['busy']:.2f}" if i else "",
                f"{GOALS[case['clip']]:.2f}" if ours else "",
            )
        table.add_section()
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, title="compiling the whole step")
    for title in ("leaves", "contender", "seconds", "ratio", "goal"):
        table.add_column(title)
    for row in compiling:
        goal = "4.00" if row["leaves"] == 200 and row["name"].startswith("gradlift") else ""
        cells = str(row["leaves"]), row["name"], f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"
        table.add_row(*cells, goal)
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"steps": found, "compile": compiling}, indent=1))


if __name__ == "__main__":
    main()

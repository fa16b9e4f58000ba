"""A character-level GPT in plain JAX and optax, computed in float16, on Python's own manual.

    python examples/jax_gpt.py                      # 250 steps, half a minute on two cores
    python examples/jax_gpt.py --dtype float32      # no loss scaling: to compare
    python examples/jax_gpt.py --journal run.jsonl  # then: gradlift report run.jsonl

Lines that deal with float16 end in #.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import Progress, TextColumn

import gradlift
import gradlift.jax as gl

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 32, 8
LR, MAX_NORM, WARMUP = 3e-3, 1.0, 20
CAUSAL = np.tri(CONTEXT, dtype=bool)
COLUMNS = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))


def load_text() -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids to train on, token ids held out, and the size of the vocabulary."""
    text = "".join(topics[name] for name in sorted(topics))
    ids = {char: i for i, char in enumerate(sorted(set(text)))}
    tokens = np.array([ids[char] for char in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(ids)


def init(key: Any, vocabulary: int) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))

    def matrix(rows: int, columns: int) -> Any:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    block = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    block |= {"wide": (WIDTH, 4 * WIDTH), "narrow": (4 * WIDTH, WIDTH)}
    blocks = [
        {name: matrix(*shape) for name, shape in block.items()}
        | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}
        for _ in range(LAYERS)
    ]
    ends = {"characters": matrix(vocabulary, WIDTH), "positions": matrix(CONTEXT, WIDTH)}
    return ends | {"blocks": blocks, "norm": jnp.ones(WIDTH), "head": matrix(WIDTH, vocabulary)}


def normed(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)  # squares leave float16's range
    size = jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide / size).astype(x.dtype) * gain


def loss_fn(params: Any, windows: Any, policy: gl.Policy) -> Any:
    """How badly each next character is predicted."""
    p = policy.cast_to_compute(params)  #
    x = p["characters"][windows[:, :-1]] + p["positions"]
    for block in p["blocks"]:
        heads = (normed(x, block["norm1"]) @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        shares = jax.nn.softmax(jnp.where(CAUSAL, scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normed(x, block["norm2"]) @ block["wide"]) @ block["narrow"]
    logits = policy.cast_to_output(normed(x, p["norm"]) @ p["head"])  #
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def train(steps: int, seed: int, dtype: str, rule: str, journal: Path | None) -> list[float]:
    """Trains for `steps`; returns the held-out loss before and after."""
    text, heldout, vocabulary = load_text()
    params = init(jax.random.key(seed), vocabulary)
    schedule = optax.warmup_cosine_decay_schedule(0, LR, WARMUP, max(steps, WARMUP + 1), LR / 10)
    optimizer = optax.adamw(schedule)
    state = optimizer.init(params)
    scaler = gl.Scaler(rule if dtype == "float16" else "off", retries=True)  #
    policy = gl.Policy(f"params=float32,compute={dtype},output=float32")  #

    @jax.jit
    def step(params: Any, state: Any, scaler: gl.Scaler, windows: Any) -> Any:
        run = gl.value_and_grad(lambda p: loss_fn(p, windows, policy), retries=8)  #
        _, grads, scaler, result = run(scaler, params)  #
        params, state = gl.apply(optimizer, grads, state, params, result, max_norm=MAX_NORM)  #
        return params, state, scaler, result

    held = heldout[: 256 * (CONTEXT + 1)].reshape(256, CONTEXT + 1)
    measure = jax.jit(lambda p: loss_fn(p, held, gl.Policy("full")))
    before, rng = float(measure(params)), np.random.default_rng(seed)
    record = gradlift.Journal(journal) if journal else None
    with Progress(*COLUMNS) as bar:
        task = bar.add_task(dtype, total=steps, loss=before)
        for i in range(steps):
            starts = rng.integers(len(text) - CONTEXT, size=(BATCH, 1))
            windows = text[starts + np.arange(CONTEXT + 1)]
            params, state, scaler, result = step(params, state, scaler, windows)
            bar.update(task, advance=1, loss=float(result.loss))
            if record:
                gl.log(record, result, i)
    return [before, float(measure(params))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a character-level GPT in float16.")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    parser.add_argument("--rule", default="auto", help="how the scale moves")
    parser.add_argument("--journal", type=Path, help="record the run here")
    print("held-out loss {:.3f} -> {:.3f}".format(*train(**vars(parser.parse_args()))))

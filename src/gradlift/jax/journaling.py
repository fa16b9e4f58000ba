"""What a step came to, recorded: from outside `jit`, or by a callback from inside."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

from jax.experimental import io_callback

from ..core import NO_LIMITS, Limits, StepResult, conclude
from ..journal import Channel, Journal, JournalLike, Recorder, channel, current
from ..rules import Rule
from .scaler import Result

_last: dict[tuple[Channel, str], int] = {}


def log(
    journal: Channel | JournalLike | None,
    result: Result,
    step: int,
    *,
    lr: float = math.nan,
    key: str = "",
    limits: Limits = NO_LIMITS,
) -> StepResult:
    """Records a step, and raises `TrainingHalted` if it is beyond the `limits`; the halt is
    recorded before. Waits for the step's values, so call it outside `jit`.

    `journal` is a journal or the path of one; None records only to the run around
    (`gradlift.record`), which gets every line besides. `key` names one of several losses that have
    a scale each. Retries happen inside the graph, so they have no events of their own: the step's
    line has their number.

    >>> import tempfile, os, gradlift.jax as gl, jax.numpy as jnp
    >>> from gradlift import read_journal
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> *_, result = gl.value_and_grad(lambda p: p["w"].sum())(
    ...     gl.Scaler("static:8"), {"w": jnp.ones(2)})
    >>> with Journal(path) as journal:
    ...     print(gl.log(journal, result, 0))
    apply at scale 2^3, norm 1.414
    >>> run = read_journal(path)
    >>> run.steps[0].scale, run.header["rule"], run.header["parameters"]
    (8.0, 'static:8', {'w': 2})
    """
    finished = result.read(int(step), lr=float(lr), key=key)
    listener = _channel(journal, result.rule)
    if listener.recording and not listener.described:
        listener.describe(parameters=dict(result.parameters))
    return conclude(finished, result.rule, limits, listener)


def log_inside(
    journal: Channel | JournalLike | None,
    result: Result,
    step: Any,
    *,
    key: str = "",
    limits: Limits = NO_LIMITS,
) -> None:
    """`log` from inside `jit` or `scan`, by an ordered `io_callback`: the device waits for it.

    A step that every device of a `shard_map` reports is recorded once. A halt stops the program
    too; JAX then raises an error of its own, with the text of `TrainingHalted` in it.

    >>> import tempfile, os, jax, gradlift.jax as gl, jax.numpy as jnp
    >>> from gradlift import read_journal
    >>> journal = Journal(os.path.join(tempfile.mkdtemp(), "run.jsonl"))
    >>> def step(scaler, i):
    ...     *_, scaler, result = gl.value_and_grad(lambda w: (w * i).sum())(scaler, jnp.ones(2))
    ...     gl.log_inside(journal, result, i)
    ...     return scaler, None
    >>> scaler, _ = jax.lax.scan(step, gl.Scaler("static:8"), jnp.arange(3))
    >>> jax.effects_barrier()
    >>> [s.loss for s in read_journal(journal.path).steps]
    [0.0, 2.0, 4.0]
    """

    def record(result: Result, step: Any) -> None:
        listener = _channel(journal, result.rule)
        if _last.get((listener, key)) != int(step):
            _last[listener, key] = int(step)
            log(listener, result, step, key=key, limits=limits)

    io_callback(record, None, result, step, ordered=True)


def enforce(result: Result, limits: Limits, step: int) -> StepResult:
    """Raises `TrainingHalted` if a step is beyond the limits, and records nothing: where there is a
    journal, `log(..., limits=limits)` does both. Call it outside `jit`.

    >>> import gradlift.jax as gl, jax.numpy as jnp
    >>> from gradlift.core import Limits
    >>> *_, result = gl.value_and_grad(lambda w: w.sum() * jnp.nan)(gl.Scaler(), jnp.ones(2))
    >>> print(gl.enforce(result, Limits(max_consecutive_skips=2), 0))
    skip (loss non-finite) at scale 2^16, first non-finite: gradient (nan)
    """
    return conclude(result.read(step), result.rule, limits)


def _channel(journal: Channel | JournalLike | None, rule: Rule) -> Channel:
    if isinstance(journal, Channel):
        return journal
    if isinstance(journal, (str, os.PathLike)):
        journal = _opened(os.path.abspath(journal))
    return _made(journal, current(), rule)


@functools.cache
def _opened(path: str) -> Journal:
    return Journal(path)


@functools.cache
def _made(journal: Journal | None, around: Recorder | None, rule: Rule) -> Channel:
    """One channel for each journal and rule; a new one once another run is recorded around."""
    return channel("jax", rule, journal=journal)

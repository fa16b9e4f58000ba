"""A result's line in the journal: from outside `jit`, or by a callback from inside."""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.experimental import io_callback

from ..errors import MisuseError, TrainingHalted
from ..journal import Journal, Step
from ..rules import ScaleState
from ..verdict import Cause, Limits, Verdict, explain_halt
from ._scaler import Result, Scaler

_last: WeakKeyDictionary[Journal, int] = WeakKeyDictionary()


def log(
    journal: Journal,
    result: Result,
    step: int,
    *,
    lr: float = math.nan,
    culprits: tuple[str, ...] = (),
) -> None:
    """Writes what a step came to; waits for its values, so call it outside `jit`.

    >>> import tempfile, os, gradlift.jax as gl, jax.numpy as jnp
    >>> from gradlift import read_journal
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> *_, result = gl.value_and_grad(lambda w: w.sum())(gl.Scaler("static:8"), jnp.ones(2))
    >>> with Journal(path) as journal:
    ...     gl.log(journal, result, 0)
    >>> read_journal(path).steps[0].scale
    8.0
    """
    if isinstance(result.stepped, jax.core.Tracer):
        raise MisuseError("log() was called inside jit or scan: use log_inside() there")
    told = jax.device_get(result)
    cause = Cause(int(told.cause))
    stepped = bool(told.stepped)
    facts = {"cause": cause.name, "scale": float(told.scale), "next_scale": float(told.next_scale)}
    if not stepped and cause is not Cause.NO_GRADIENTS:
        journal.event("skip", step, **facts, culprits=list(culprits))
    journal.step(
        Step(
            step,
            float(told.scale),
            float(told.next_scale),
            amax=float(told.amax),
            nonfinite=cause not in (Cause.NONE, Cause.NO_GRADIENTS, Cause.LOSS_NONFINITE),
            loss=float(told.loss),
            norm=float(told.grad_norm),
            lr=float(lr),
            verdict=Verdict.APPLY if stepped else Verdict.SKIP,
            cause=cause,
            culprits=culprits,
            retries=int(told.retries),
        )
    )


def log_inside(journal: Journal, result: Result, step: Any) -> None:
    """The same from inside `jit` or `scan`, by an ordered `io_callback`: the device waits for it.

    >>> import tempfile, os, gradlift.jax as gl, jax.numpy as jnp
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

    def tell(r: Any, n: Any) -> None:
        if _last.get(journal) != int(n):  # under shard_map every device tells the same
            _last[journal] = int(n)
            log(journal, Result(*r), int(n))

    io_callback(tell, None, tuple(result), step, ordered=True)


def enforce(scaler: Scaler, result: Result, limits: Limits, step: int | None = None) -> None:
    """Raises `TrainingHalted` if the run has skipped too often; call it outside `jit`.

    `scaler` is the one *after* the step that `result` tells of.

    >>> import gradlift.jax as gl, jax.numpy as jnp
    >>> from gradlift.verdict import Limits
    >>> *_, scaler, result = gl.value_and_grad(lambda w: w.sum() * jnp.nan)(Scaler(), jnp.ones(2))
    >>> gl.enforce(scaler, result, Limits(max_consecutive_skips=2))
    """
    if limits == Limits():
        return
    state, told = jax.device_get((scaler.state, result))
    cause, skips = Cause(int(told.cause)), int(state.skips)
    if bool(told.stepped) or cause is Cause.NO_GRADIENTS:
        return
    most, at_floor = limits.max_consecutive_skips, cause is Cause.FLOOR
    if at_floor and limits.on_floor == "warn":
        warnings.warn(
            f"overflow at the smallest scale, {float(told.scale):g}: the step was skipped and the "
            "scale held",
            stacklevel=2,
        )
    if (at_floor and limits.on_floor == "raise") or (most is not None and skips > most):
        before = ScaleState(float(told.scale), skips=skips - 1)
        raise TrainingHalted(explain_halt(cause, before, scaler.rule, step=step))

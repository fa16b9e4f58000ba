"""NumPy: the reference adapter. Short, readable, and what the other adapters are tested against.

    loss -> scale -> (your backward) -> inspect -> decide -> unscale+clip+step -> advance -> record

>>> import numpy as np
>>> import gradlift.numpy as gl
>>> weights = {"w": np.ones(1, np.float32)}
>>> def sgd(weights, grads):
...     weights["w"] -= 0.5 * grads["w"]
>>> scaler = gl.Scaler("dynamic")
>>> for gradient in (3.0, 0.25):                            # times 2^16, then times 2^15
...     loss = scaler.scale(1.0)                            # notes whether the loss is finite
...     with np.errstate(over="ignore"):
...         scaled = {"w": np.float16([gradient * scaler.get_scale()])}
...     print(scaler.step(weights, scaled, sgd), weights["w"])
skip (overflow) at scale 2^16, first non-finite: w [1.]
apply at scale 2^15, norm 0.25 [0.875]
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import SettingsError, StateError, TrainingHalted
from .formats import FP32
from .journal import JournalLike, Step, opened
from .reading import Reading
from .rules import Off, Rule, parse
from .verdict import Cause, Limits, StepResult, Verdict, decide, explain_halt

Grads = Mapping[str, "np.ndarray | None"] | np.ndarray
Update = Callable[[Any, Any], None]

_SCHEMA = 1


def _named(grads: Grads) -> dict[str, np.ndarray]:
    """The gradients by name; None (a parameter without gradient) is left out."""
    pairs = grads.items() if isinstance(grads, Mapping) else [("gradient", grads)]
    named = {str(name): np.asarray(g) for name, g in pairs if g is not None}
    for name, g in named.items():
        if not np.issubdtype(g.dtype, np.floating):
            raise SettingsError(
                f"the gradient of {name!r} is {g.dtype}, expected a real floating-point array"
            )
    return named


def inspect(grads: Grads, scale: float = 1.0) -> Reading:
    """One look at the scaled gradients; nothing is written.

    Checked is what will be *used*: a finite gradient that `1/scale` carries out of float32 counts
    as non-finite.

    >>> inspect({"w": np.array([3.0, -4.0], np.float16)}, scale=2.0).norm
    2.5
    """
    named = _named(grads)
    nonfinite, amax, squares = False, 0.0, 0.0
    for g in named.values():
        finite = np.isfinite(g)
        nonfinite = nonfinite or not finite.all()
        size = np.abs(g, where=finite, out=np.zeros(g.shape, np.float64))
        amax = max(amax, float(size.max(initial=0.0)))
        squares += float((size * size).sum())
    nonfinite = nonfinite or amax / scale > FP32.max
    norm = math.nan if nonfinite else math.sqrt(squares) / scale
    return Reading(nonfinite, amax, checked=bool(named), norm=norm)


def culprits(grads: Grads) -> tuple[str, ...]:
    """Names of the gradients that are not finite, last layer (the first to be computed) in front.

    >>> culprits({"a": np.array([np.nan]), "b": np.array([1.0]), "c": np.array([np.inf])})
    ('c', 'a')
    """
    return tuple(n for n, g in reversed(_named(grads).items()) if not np.isfinite(g).all())


def unscale(grads: Grads, scale: float, *, max_norm: float | None = None, norm: float = 0.0) -> Any:
    """The true gradients in float32: one factor, `1/scale x clip coefficient`, in one pass.

    >>> unscale({"w": np.array([8.0], np.float16)}, 4.0)
    {'w': array([2.], dtype=float32)}
    """
    factor = np.float32(1 / scale)
    if max_norm is not None:
        factor = np.float32(min(1.0, max_norm / (norm + 1e-6)) / scale)
    if not isinstance(grads, Mapping):
        return grads.astype(np.float32) * factor
    return {n: None if g is None else g.astype(np.float32) * factor for n, g in grads.items()}


class Masters(dict[str, np.ndarray]):
    """FP32 master copies of 16-bit weights; an applied step is written back to the weights.

    >>> half = {"w": np.ones(1, np.float16)}
    >>> masters = Masters(half)
    >>> for _ in range(1000):
    ...     masters["w"] += np.float32(1e-4)       # each too small for float16 to notice
    >>> masters.write_back()
    >>> half["w"]
    array([1.1], dtype=float16)
    """

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__({name: w.astype(np.float32) for name, w in weights.items()})
        self.weights = weights

    def write_back(self) -> None:
        """Rounds the masters into the 16-bit weights."""
        for name, master in self.items():
            np.copyto(self.weights[name], master, casting="same_kind")


class Scaler:
    """Scales a loss, checks the gradients, and applies a step or leaves everything untouched.

    >>> scaler = Scaler("static:8")
    >>> scaler.scale(0.5)
    np.float32(4.0)
    """

    def __init__(
        self,
        rule: Rule | str | float = "dynamic",
        *,
        max_consecutive_skips: int | None = None,
        on_floor: str = "hold",
        journal: JournalLike | None = None,
    ) -> None:
        self.rule = parse(rule)
        self.limits = Limits(max_consecutive_skips, on_floor)
        self.state = self.rule.init()
        self.result: StepResult | None = None
        self.steps = self.skipped_steps = 0
        self.journal = opened(journal)
        if self.journal is not None:
            self.journal.describe(rule=str(self.rule), framework="numpy")
        self._losses: list[float] = []
        self._since = time.perf_counter()

    def get_scale(self) -> float:
        """The scale that the next backward pass should carry."""
        return float(self.state.scale)

    def scale(self, loss: Any) -> Any:
        """loss * scale in float32; notes whether the loss itself was finite."""
        finite = bool(np.isfinite(loss).all())
        self._losses.append(float(np.sum(loss, dtype=np.float64)) if finite else math.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(loss, np.float32(self.state.scale), dtype=np.float32)

    def step(
        self, weights: Any, grads: Grads, update: Update, *, max_norm: float | None = None
    ) -> StepResult:
        """Calls `update(weights, true gradients)` if the scaled `grads` are sound; moves the scale.

        `weights` may be `Masters`; they are then written back.
        """
        reading = self._inspect(grads, max_norm)
        verdict, cause = self._decide(reading, 0)
        return self._finish(weights, grads, update, max_norm, reading, verdict, cause, 0)

    def train_step(
        self,
        compute: Callable[[float], tuple[float, Grads]],
        weights: Any,
        update: Update,
        *,
        max_norm: float | None = None,
        retries: int = 0,
    ) -> StepResult:
        """A whole step: `compute(scale)` gives the loss and the gradients of loss * scale.

        After an overflow the same batch is computed again, up to `retries` times, at the lower
        scale: no batch is lost.
        """
        sound = None  # a scale at which this batch was clean
        for tries in range(retries + 1):
            self._losses.clear()
            loss, grads = compute(self.get_scale())
            self._losses.append(float(loss))
            reading = self._inspect(grads, max_norm)
            verdict, cause = self._decide(reading, retries - tries)
            if verdict is not Verdict.RETRY:
                break
            before, after = self.state, self.rule.advance(self.state, reading)
            self.state = after._replace(skips=before.skips)  # a retry is no skip
            if cause is Cause.CALIBRATION:
                sound = before.scale
            elif sound is not None and retries - tries == 1:
                self.state = self.state._replace(scale=sound)  # the last try must not be lost
            self._event("retry", before.scale, cause, culprits(grads))
        return self._finish(weights, grads, update, max_norm, reading, verdict, cause, tries)

    def _inspect(self, grads: Grads, max_norm: float | None) -> Reading:
        if max_norm is not None and not max_norm > 0:
            raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
        if isinstance(self.rule, Off):
            norm = math.nan if max_norm is None else inspect(grads).norm
            return Reading(nonfinite=False, amax=math.nan, norm=norm)
        try:
            reading = inspect(grads, self.get_scale())
        except SettingsError:
            self._losses.clear()  # they were this step's and no other's
            raise
        return reading._replace(loss_nonfinite=not all(map(math.isfinite, self._losses)))

    def _decide(self, reading: Reading, retries_left: int) -> tuple[Verdict, Cause]:
        return decide(
            reading,
            self.state,
            self.rule,
            self.limits,
            loss_known=bool(self._losses),
            retries_left=retries_left,
        )

    def _finish(
        self,
        weights: Any,
        grads: Grads,
        update: Update,
        max_norm: float | None,
        reading: Reading,
        verdict: Verdict,
        cause: Cause,
        retries: int,
    ) -> StepResult:
        before = self.state
        if verdict is Verdict.APPLY:
            update(weights, unscale(grads, before.scale, max_norm=max_norm, norm=reading.norm))
            if isinstance(weights, Masters):
                weights.write_back()
        self.state = self.rule.advance(before, reading)
        bad = culprits(grads) if reading.nonfinite else ()
        self.result = StepResult(verdict, cause, before.scale, reading.norm, bad, retries)
        if verdict is not Verdict.APPLY and cause is not Cause.NO_GRADIENTS:
            self.skipped_steps += 1
            self._event(str(verdict), before.scale, cause, bad)
        if self.journal is not None:
            self.journal.step(self._record(reading, self.result))
        if cause is Cause.FLOOR and self.limits.on_floor == "warn":
            warnings.warn(
                f"overflow at the smallest scale, {before.scale:g}: the step was skipped and the "
                f"scale held. First non-finite gradient: {bad[0] if bad else 'unknown'}",
                stacklevel=3,
            )
        step, self.steps = self.steps, self.steps + 1
        self._losses.clear()
        if verdict is Verdict.HALT:
            raise TrainingHalted(explain_halt(cause, before, self.rule, step=step, culprits=bad))
        return self.result

    def _event(self, what: str, scale: float, cause: Cause, bad: tuple[str, ...]) -> None:
        if self.journal is not None:
            self.journal.event(
                what,
                self.steps,
                cause=cause.name,
                scale=scale,
                next_scale=float(self.state.scale),
                culprits=bad,
            )

    def _record(self, reading: Reading, result: StepResult) -> Step:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return Step(
            self.steps,
            scale=result.scale,
            next_scale=float(self.state.scale),
            amax=reading.amax,
            nonfinite=bool(reading.nonfinite),
            loss=math.fsum(self._losses) if self._losses else math.nan,
            norm=reading.norm,
            verdict=result.verdict,
            cause=result.cause,
            culprits=result.culprits,
            retries=result.retries,
            seconds=seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, JSON-able."""
        return {
            "schema": _SCHEMA,
            "rule": str(self.rule),
            "state": self.rule.dump(self.state),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()`; refuses what is damaged and then changes nothing."""
        if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
            raise StateError("this is not the state_dict() of a gradlift.numpy.Scaler")
        counts = [data.get(name) for name in ("steps", "skipped_steps")]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise StateError(f"steps and skipped_steps are {counts}, expected two counts")
        self.state = self.rule.load(data.get("state"))
        self.steps, self.skipped_steps = counts  # type: ignore[assignment]

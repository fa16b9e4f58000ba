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
skip (overflow) at scale 2^16, first non-finite: w (inf) [1.]
apply at scale 2^15, norm 0.25 [0.875]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .core import (
    Culprit,
    Decision,
    Limits,
    LossScale,
    LossScaleOwner,
    Note,
    StepResult,
    Verdict,
    checked_max_norm,
    clip_coefficient,
    loss_blamed,
    loss_level,
    weights_nonfinite,
)
from .errors import SettingsError, add_note
from .formats import FP32
from .journal import JournalLike, channel
from .reading import Reading
from .rules import Off, Rule
from .text import shown

Grads = Mapping[str, "np.ndarray | None"] | np.ndarray
Update = Callable[[Any, Any], None]
_ALONE = "gradient"
"""The name of a gradient that came without one."""


def _arrays(grads: Grads) -> dict[Any, np.ndarray | None]:
    """The gradients as plain arrays, by name: what is checked, and what is used."""
    pairs = grads.items() if isinstance(grads, Mapping) else [(_ALONE, grads)]
    return {name: None if g is None else _array(name, g) for name, g in pairs}


def _array(name: Any, gradient: Any) -> np.ndarray:
    if isinstance(gradient, np.ma.MaskedArray):
        raise SettingsError(
            f"the gradient of {shown(name)} is a masked array, whose masked elements NumPy leaves "
            "out of some operations and not of others: give .filled(0)"
        )
    try:
        g = np.asarray(gradient)
    except ValueError as error:  # a list of arrays of several shapes
        raise SettingsError(
            f"the gradient of {shown(name)} is no array ({error}): give a dict of arrays"
        ) from None
    if not np.issubdtype(g.dtype, np.floating):
        raise SettingsError(
            f"the gradient of {shown(name)} is {g.dtype}, expected a real floating-point array"
        )
    return g


def _named(grads: Grads) -> list[tuple[str, np.ndarray]]:
    """The gradients there are; None (a parameter without gradient) is left out."""
    return [(str(name), g) for name, g in _arrays(grads).items() if g is not None]


def inspect(grads: Grads, scale: float = 1.0) -> Reading:
    """One look at the scaled gradients; nothing is written.

    Checked is what will be *used*: a finite gradient that leaves float32, as it is or once the
    scale is taken out, counts as non-finite.

    >>> inspect({"w": np.array([3.0, -4.0], np.float16)}, scale=2.0).norm
    2.5
    """
    named = _named(grads)
    nonfinite, amax, squares = False, 0.0, 0.0
    for _, g in named:
        finite = np.isfinite(g)
        nonfinite = nonfinite or not finite.all()
        with np.errstate(over="ignore"):  # of what is skipped for its size anyway
            size = np.abs(g, where=finite, out=np.zeros(g.shape, np.float64))
            amax = max(amax, float(size.max(initial=0.0)))
            squares += float((size * size).sum())
    nonfinite = nonfinite or max(amax, amax / scale) > FP32.max
    norm = math.nan if nonfinite else math.sqrt(squares) / scale
    return Reading(nonfinite, amax, checked=bool(named), norm=norm)


def culprits(grads: Grads, scale: float = 1.0) -> tuple[Culprit, ...]:
    """Gradients that are not finite, by name, last layer (the first to be computed) in front.

    As in `inspect`, one that leaves float32 is inf.

    >>> culprits({"a": np.array([np.nan]), "b": np.array([1.0]), "c": np.array([1e40])})
    ('c', 'a')
    """
    largest = FP32.max * min(1.0, scale)
    bad = []
    for name, g in _named(grads):
        with np.errstate(over="ignore"):  # a longdouble beyond float64 is inf
            beyond = np.abs(g, dtype=np.float64) > largest
        if np.isnan(g).any():
            bad.append(Culprit(name, "nan"))
        elif beyond.any():
            bad.append(Culprit(name, "inf"))
    return tuple(reversed(bad))


def unscale(grads: Grads, scale: float, *, max_norm: float | None = None, norm: float = 0.0) -> Any:
    """The true gradients in float32: one factor, `1/scale x clip coefficient`, in one pass.

    >>> unscale({"w": np.array([8.0], np.float16)}, 4.0)
    {'w': array([2.], dtype=float32)}
    """
    coefficient = 1.0 if max_norm is None else clip_coefficient(norm, max_norm)
    factors = [coefficient / scale]
    if factors[0] < FP32.smallest_normal:  # in one factor it would lose bits, or be 0
        factors = [1 / scale, coefficient]
    true = {}
    for name, g in _arrays(grads).items():
        true[name] = None if g is None else g.astype(np.float32)
        for factor in factors if g is not None else ():
            true[name] = true[name] * np.float32(factor)
    return true if isinstance(grads, Mapping) else true[_ALONE]


def _about(weights: Any) -> tuple[Note, ...]:
    """After a bad step: a note if the weights, so far as they are arrays, are not finite."""
    pairs = weights.items() if isinstance(weights, Mapping) else [("weight", weights)]
    bad = [
        Culprit(str(name), "nan" if np.isnan(w).any() else "inf")
        for name, w in pairs
        if isinstance(w, np.ndarray) and w.dtype.kind == "f" and not np.isfinite(w).all()
    ]
    return (weights_nonfinite(bad),) if bad else ()


def _check_weight(name: Any, w: Any) -> None:
    """Can a master be written back into this weight?"""
    if isinstance(w, np.ndarray) and not isinstance(w, np.ma.MaskedArray):
        if w.dtype.kind == "f" and w.dtype.itemsize <= 4 and w.flags.writeable:
            return
        what = f"{w.dtype}{'' if w.flags.writeable else ' and read-only'}"
    else:
        what = f"a {type(w).__name__}"
    raise SettingsError(
        f"the weight {shown(name)} is {what}, expected an array of float16 or float32 that can be "
        "written to"
    )


class Masters(dict[str, np.ndarray]):
    """FP32 master copies of 16-bit weights; an applied step is written back to the weights.

    >>> half = {"w": np.ones(1, np.float16)}
    >>> masters = Masters(half)
    >>> for _ in range(1000):
    ...     masters["w"] += np.float32(1e-4)       # each too small for float16 to notice
    >>> masters.write_back()                       # names of weights that left float16's range
    []
    >>> half["w"]
    array([1.1], dtype=float16)
    """

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        masters: dict[int, np.ndarray] = {}
        for name, w in weights.items():
            _check_weight(name, w)
            if id(w) not in masters:
                if any(np.shares_memory(w, other) for other in weights.values() if other is not w):
                    raise SettingsError(
                        f"the weight {shown(name)} shares memory with another one, so that their "
                        "masters would write over each other: give the same array for both, or "
                        "the array that they are views of"
                    )
                masters[id(w)] = w.astype(np.float32)
        super().__init__({name: masters[id(w)] for name, w in weights.items()})
        self.weights = weights

    def write_back(self) -> list[str]:
        """Rounds the masters into the 16-bit weights. One that left their range stays at their
        largest number; returns the names of these."""
        held: list[str] = []
        tied: dict[int, np.ndarray] = {}
        for name, master in self.items():
            if name not in self.weights or np.shape(master) != self.weights[name].shape:
                raise SettingsError(
                    f"the master {shown(name)} has the shape {np.shape(master)}, and there is no "
                    "such weight: change masters in place, and make Masters anew for new weights"
                )
            if tied.setdefault(id(self.weights[name]), master) is not master:
                raise SettingsError(
                    f"the weight {shown(name)} has two names, and now two masters that differ: "
                    "change masters in place"
                )
        for name, master in self.items():
            weight = self.weights[name]
            with np.errstate(over="ignore"):
                np.copyto(weight, master, casting="same_kind")
            beyond = np.isinf(weight)
            if beyond.any():
                held.append(name)
                most = np.finfo(weight.dtype).max
                np.copyto(weight, np.copysign(most, weight), where=beyond)
        return held


class Scaler(LossScaleOwner):
    """Scales a loss, checks the gradients, and applies a step or leaves everything untouched.

    "auto" is cautious until the first `train_step` with retries, which makes it sharp.

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
        self._loss_scale = LossScale(rule, Limits(max_consecutive_skips, on_floor))
        self._channel = channel("numpy", self.rule, journal=journal)
        self._loss_scale.listener = self._channel
        self._losses: list[float] = []

    def scale(self, loss: Any) -> Any:
        """loss * scale in float32; notes whether the loss itself was finite."""
        self._note(loss)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(loss, np.float32(self.state.scale), dtype=np.float32)

    def step(
        self, weights: Any, grads: Grads, update: Update, *, max_norm: float | None = None
    ) -> StepResult:
        """Calls `update(weights, true gradients)` if the scaled `grads` are sound; moves the scale.

        `weights` may be `Masters`; they are then written back.
        """
        grads = self._taken(grads)
        decision = self._decide(grads, max_norm)
        return self._finish(decision, weights, grads, update, max_norm)

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
        if retries:
            self._loss_scale.sharpen()
            self._channel.rule = self.rule
        for left in range(retries, -1, -1):
            self._losses.clear()
            loss, grads = compute(self.get_scale())
            self._note(loss)
            grads = self._taken(grads)
            decision = self._decide(grads, max_norm, left)
            if decision.verdict is not Verdict.RETRY:
                break
            self._describe(grads)
            self._loss_scale.retry(decision, culprits=culprits(grads, self.get_scale()))
        return self._finish(decision, weights, grads, update, max_norm)

    def _note(self, loss: Any) -> None:
        """The sum of a loss's elements; not finite if one of them is not."""
        with np.errstate(invalid="ignore"):
            self._losses.append(float(np.sum(loss, dtype=np.float64)))

    def _taken(self, grads: Grads) -> Any:
        """The gradients, read once: what a mapping gives may differ from call to call."""
        try:
            arrays = _arrays(grads)
        except SettingsError:
            self._losses.clear()  # they were this step's and no other's
            raise
        return arrays if isinstance(grads, Mapping) else arrays[_ALONE]

    def _describe(self, grads: Grads) -> None:
        """Before the journal's first line: the parameters are known by their gradients."""
        if self._channel.recording and not self._channel.described:
            self._channel.describe(parameters={n: g.size for n, g in _named(grads)})

    def _decide(self, grads: Grads, max_norm: float | None, retries_left: int = 0) -> Decision:
        """Inspects the gradients, blames the loss or the scale, decides. Nothing moves."""
        if max_norm is not None:
            checked_max_norm(max_norm)
        if isinstance(self.rule, Off):
            norm = math.nan if max_norm is None else inspect(grads).norm
            return self._loss_scale.decide(Reading(nonfinite=False, amax=math.nan, norm=norm))
        reading = inspect(grads, self.get_scale())
        level = loss_level([not math.isfinite(loss) for loss in self._losses])
        reading = reading._replace(loss_nonfinite=loss_blamed(level, reading.nonfinite))
        known = bool(self._losses)
        return self._loss_scale.decide(reading, loss_known=known, retries_left=retries_left)

    def _finish(
        self,
        decision: Decision,
        weights: Any,
        grads: Grads,
        update: Update,
        max_norm: float | None,
    ) -> StepResult:
        """Unscales, clips and updates if the step is applied; then moves the scale and records."""
        reading = decision.reading
        held: list[str] = []
        if decision.verdict is Verdict.APPLY:
            true = unscale(grads, self.get_scale(), max_norm=max_norm, norm=reading.norm)
            try:
                update(weights, true)
            except Exception as error:
                add_note(
                    error,
                    "update() raised in the middle of a step: weights and optimizer state may have "
                    "been changed in part. The scale has not moved, and step() may be called again",
                )
                raise
            if isinstance(weights, Masters):
                held = weights.write_back()
        self._describe(grads)
        losses, self._losses = self._losses, []
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        blamed = reading.loss_nonfinite and len(losses) > 1
        return self._loss_scale.finish(
            decision,
            loss=sum(losses) if losses else math.nan,
            culprits=culprits(grads, self.get_scale()) if reading.nonfinite else (),
            micro_batch=bad[0] if blamed else None,
            notes=() if decision.verdict is Verdict.APPLY else _about(weights),
            held=held,
            largest=float(np.finfo(weights.weights[held[0]].dtype).max) if held else math.nan,
        )

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()` of any adapter, or of torch's scaler; refuses what is damaged
        and then changes nothing."""
        super().load_state_dict(data)
        self._channel.rule = self.rule
        self._losses.clear()

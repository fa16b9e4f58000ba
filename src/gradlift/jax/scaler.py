"""`Scaler`, `Result`, and the arithmetic of one step that both routes share."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core import (
    HALF_LOSS,
    HALF_LOSS_CEILING,
    Cause,
    Culprit,
    Finished,
    Verdict,
    carried,
    cause_of,
    loss_blamed,
    verdict_of,
)
from ..core import state as saved_state
from ..errors import MisuseError, StateError
from ..reading import Reading
from ..rules import PRESETS, Off, Rule, ScaleState, resolve
from . import devices as _axis
from .finite_checking import largest, leaves_of, look, named_culprits, named_leaves

Parameters = tuple[tuple[str, int], ...]
"""Name and size of each parameter that has a gradient."""
_CAUTIOUS = PRESETS["auto:cautious"][1]


class StepCounts(NamedTuple):
    """Steps so far, and how many of them were skipped."""

    steps: Any
    skipped: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaler:
    """A rule, its state and two counts: a pytree whose leaves are nine scalars.

    The rule is part of the program, so "auto" is settled here: cautious, or sharp with
    `retries=True`, for `value_and_grad(..., retries=n)`.

    >>> scaler = Scaler("dynamic:init_scale=8")
    >>> scaler.get_scale(), int(scaler.steps)
    (8.0, 0)
    >>> Scaler("auto", retries=True).rule == Scaler("auto:sharp").rule != Scaler("auto").rule
    True
    """

    rule: Rule = dataclasses.field(default="dynamic", metadata={"static": True})  # type: ignore[assignment]
    state: ScaleState = None  # type: ignore[assignment]
    counts: StepCounts = None  # type: ignore[assignment]
    retries: dataclasses.InitVar[bool] = False

    def __post_init__(self, retries: bool) -> None:
        if not isinstance(self.rule, Rule):
            object.__setattr__(self, "rule", resolve(self.rule, retries=retries))
        if self.state is None:
            object.__setattr__(self, "state", arrays(self.rule.init()))
        if self.counts is None:
            object.__setattr__(self, "counts", StepCounts(jnp.int32(0), jnp.int32(0)))
        tell_flax()

    @property
    def steps(self) -> Any:
        """Steps so far, applied or not."""
        return self.counts.steps

    @property
    def skipped_steps(self) -> Any:
        """Steps that had something to apply and were not applied."""
        return self.counts.skipped

    def get_scale(self) -> float:
        """The scale of the next loss as a number. Reads the device.

        >>> Scaler("static:8").get_scale()
        8.0
        """
        return float(self.state.scale)

    def used(self, loss_dtype: Any = jnp.float32) -> Any:
        """The scale that a loss of this type can carry: at most 2^15 if it is float16.

        >>> float(Scaler("static:2^16").used(jnp.float32))
        65536.0
        """
        half = loss_dtype == jnp.float16 and self.rule.max_scale > HALF_LOSS_CEILING
        if half and self.rule.min_scale > HALF_LOSS_CEILING:
            raise MisuseError(
                f"the loss is float16, which carries a scale of 2^15 at most, and the rule "
                f"'{self.rule}' stays above that: compute the loss in float32"
            )
        return carried(self.state.scale, half, jnp)

    def capped(self, loss_dtype: Any) -> Scaler:
        """This scaler at the scale that a loss of this type carries."""
        return dataclasses.replace(self, state=self.state._replace(scale=self.used(loss_dtype)))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON, in the layout that all adapters share.

        >>> Scaler("static:8").state_dict()["scale"]
        8.0
        """
        sharp = any(getattr(self.rule, name, None) != value for name, value in _CAUTIOUS.items())
        state, (steps, skipped) = jax.device_get((self.state, self.counts))
        return saved_state.save(
            self.rule, state, steps=int(steps), skipped=int(skipped), sharp=sharp
        )

    def load_state_dict(self, data: Any) -> Scaler:
        """A scaler of this rule with the state in `data`, from any adapter or torch's own scaler.

        Refuses what is damaged or belongs to another rule.

        >>> scaler = Scaler("dynamic").load_state_dict(Scaler("dynamic:init_scale=8").state_dict())
        >>> float(scaler.state.scale)
        8.0
        """
        loaded = saved_state.load(self.rule, data)
        counts = StepCounts(jnp.int32(loaded.steps), jnp.int32(loaded.skipped))
        return dataclasses.replace(self, state=arrays(loaded.state), counts=counts)


_unknown_to_flax: list[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = []


def scaled_loss(scaler: Scaler, loss: Any) -> Any:
    """loss * scale, in float32. Not a method: whoever could call it could scale a loss twice.

    >>> float(scaled_loss(Scaler("static:8"), jnp.float16(0.5)))
    4.0
    """
    if isinstance(scaler.rule, Off):
        return loss
    wide = checked_loss(loss)
    return wide.astype(jnp.promote_types(wide.dtype, jnp.float32)) * scaler.used(wide.dtype)


def saved_by_flax(kind: type, to_dict: Callable[[Any], Any], from_dict: Any) -> None:
    """How flax' msgpack takes objects of this kind, once flax is imported."""
    _unknown_to_flax.append((kind, to_dict, from_dict))


def tell_flax() -> None:
    """Registers what flax does not know yet, if it is imported; this package never imports it.

    Called whenever such an object is made, since flax may be imported later.
    """
    serialization = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    while _unknown_to_flax and register is not None:
        register(*_unknown_to_flax.pop())


def fields_to_save(held: Any) -> dict[str, Any]:
    """The leaves of a dataclass by name, as flax keeps its own."""
    return {name: getattr(held, name) for name in _leaf_names(held)}


def with_saved_fields(held: Any, data: dict[str, Any]) -> Any:
    """`held` with the leaves in `data`; refuses other names, shapes and types."""
    names = _leaf_names(held)
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise StateError(f"a saved {type(held).__name__} has {names}, this has {found}")
    for name in names:
        own, given = jnp.shape(getattr(held, name)), jnp.shape(data[name])
        if own != given:
            raise StateError(
                f"'{name}' of the saved {type(held).__name__} has shape {list(given)}, expected "
                f"{list(own)}: was it saved with other parameters?"
            )
    return dataclasses.replace(held, **{name: data[name] for name in names})


def _leaf_names(held: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(held) if not f.metadata.get("static")]


saved_by_flax(Scaler, Scaler.state_dict, Scaler.load_state_dict)


def checked_loss(loss: Any) -> Any:
    """The loss as an array, or an error that says what is wrong with it."""
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise MisuseError(f"the loss is {loss.dtype}, expected a real floating-point number")
    if loss.shape != ():
        raise MisuseError(
            f"the loss has shape {loss.shape}, expected a scalar: take its mean or its sum"
        )
    return loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What a step came to: a small pytree of arrays that stay on the device until one looks.

    `verdict` and `culprits` look: they are for outside `jit`, and of one step.

    >>> import gradlift.jax as gl
    >>> loss, grads, scaler, result = gl.value_and_grad(lambda w: (w * 3.0).sum())(
    ...     gl.Scaler("static:8"), jnp.ones(2))
    >>> bool(result.stepped), float(result.scale), result.verdict
    (True, 8.0, <Verdict.APPLY: 'apply'>)
    """

    cause: Any
    """Why the gradients are not to be applied: a number of `gradlift.Cause`, 0 if they are."""
    scale: Any
    """The scale these gradients carried."""
    next_scale: Any
    """The scale that the next ones will carry."""
    grad_norm: Any
    """Of the true gradients, before clipping; NaN if they are not finite."""
    amax: Any
    """Largest |gradient| as scaled; NaN where the rule does not need it."""
    loss: Any
    """The loss, in float32; NaN where it is not known."""
    retries: Any
    """How often this batch was computed again."""
    skips: Any
    """How many steps in a row were skipped before this one."""
    nonfinite: Any
    """Is a gradient not finite?"""
    kinds: Any
    """For each of `parameters` 0, or 1 if its gradient holds inf, or 2 if it holds NaN."""
    bad_loss: Any
    """Index of the first of several losses that was not finite; -1 if none was."""
    rule: Rule = dataclasses.field(metadata={"static": True})
    parameters: Parameters = dataclasses.field(metadata={"static": True}, repr=False)
    half_loss: bool = dataclasses.field(metadata={"static": True})
    """Was the loss computed in float16?"""

    @property
    def stepped(self) -> Any:
        """Are the gradients to be applied?"""
        return self.cause == Cause.NONE

    @property
    def verdict(self) -> Verdict:
        """What became of the step, limits aside: `log` and `enforce` know those."""
        finished = self.read(0)
        return verdict_of(finished.cause, finished.before.skips)

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """Parameters whose gradients were not finite, each with its kind, the last in front."""
        return self.read(0).culprits

    def read(self, step: int, *, lr: float = math.nan, key: str = "") -> Finished:
        """The step in Python numbers, in one transfer."""
        if isinstance(self.cause, jax.core.Tracer):
            raise MisuseError(
                "a result has numbers outside of jit and scan only: return it, or record it from "
                "inside with log_inside()"
            )
        if jnp.ndim(self.cause):
            raise MisuseError(
                f"this result holds {jnp.size(self.cause)} steps or devices (scan, vmap, pmap), "
                "expected one: jax.tree.map(lambda x: x[0], result) is the first of them"
            )
        held = jax.device_get(self)
        cause = Cause(int(held.cause))
        blamed = cause is Cause.LOSS_NONFINITE
        return Finished(
            step,
            ScaleState(float(held.scale), skips=int(held.skips)),
            float(held.next_scale),
            Reading(
                bool(held.nonfinite),
                float(held.amax),
                blamed,
                checked=cause is not Cause.NO_GRADIENTS,
                norm=float(held.grad_norm),
            ),
            cause,
            float(held.loss),
            named_culprits([name for name, _ in self.parameters], held.kinds.tolist()),
            int(held.retries),
            micro_batch=int(held.bad_loss) if blamed and held.bad_loss >= 0 else None,
            notes=(HALF_LOSS,) if self.half_loss else (),
            lr=lr,
            key=key,
        )


saved_by_flax(Result, fields_to_save, with_saved_fields)


def arrays(state: ScaleState) -> ScaleState:
    """A state as 0-d arrays: float32 and int32, none of them weak."""
    return ScaleState(
        jnp.asarray(state.scale, jnp.float32), *(jnp.asarray(x, jnp.int32) for x in state[1:])
    )


def parameters_of(grads: Any) -> Parameters:
    """The parameters that have a gradient here.

    >>> parameters_of({"w": jnp.ones((2, 3)), "b": None})
    (('w', 6),)
    """
    return tuple((name, leaf.size) for name, leaf in named_leaves(grads))


def no_kinds(parameters: Parameters) -> Any:
    """The kinds of gradients that were not looked at."""
    return jnp.zeros(len(parameters), jnp.int8)


def read(
    scaler: Scaler,
    grads: Any,
    losses: Any,
    axis_name: Any = None,
    local: Any = None,
    *,
    carried: bool = True,
) -> tuple[Reading, Any]:
    """What gradients showed, and each one's kind. `scaler` is at the scale of their backward pass;
    is it `carried` by them still?

    `losses` are the window's (None: not known). `local` are this device's own gradients, before
    the average: they overflow first.
    """
    if isinstance(scaler.rule, Off):
        return Reading(False, jnp.float32(jnp.nan)), no_kinds(parameters_of(grads))
    leaves = leaves_of(grads)
    if not leaves:
        return Reading(False, jnp.float32(0), checked=False), no_kinds(())
    magnitudes = scaler.rule.magnitudes
    inverse = 1 / scaler.state.scale if carried else 1.0
    found = look(leaves, inverse, amax=magnitudes and local is None)
    amax = found.amax
    if magnitudes and local is not None:
        top = largest(leaves_of(local))
        top = _axis.largest(jnp.where(jnp.isfinite(top), top, 0), axis_name)
        amax = jnp.where(found.nonfinite, jnp.inf, top)
    if magnitudes and not carried:
        amax = amax * scaler.state.scale
    blamed: Any = False
    if losses is not None:
        bad = ~jnp.isfinite(losses)
        level = jnp.int32(bad.any()) + bad.all()  # core.loss_level in the graph
        if axis_name is not None:
            level = _axis.largest(level, axis_name)
        blamed = loss_blamed(level, found.nonfinite)
    return Reading(found.nonfinite, amax, blamed, norm=found.norm), found.kinds


def first_bad_loss(losses: Any, axis_name: Any = None) -> Any:
    """Index of the first of several losses that is not finite, on any device; -1 if none is.

    >>> int(first_bad_loss(jnp.array([1.0, jnp.nan, jnp.inf]))), first_bad_loss(jnp.float32(1))
    (1, -1)
    """
    if losses is None or jnp.size(losses) < 2:
        return -1
    bad = ~jnp.isfinite(jnp.ravel(losses))
    first = jnp.where(bad.any(), jnp.argmax(bad), -1)
    return first if axis_name is None else _axis.largest(first, axis_name)


def advanced(scaler: Scaler, reading: Reading) -> Scaler:
    """The scaler after a step that showed `reading`."""
    if isinstance(scaler.rule, Off) or reading.checked is False:
        return scaler
    seen = reading.nonfinite, reading.amax, reading.loss_nonfinite
    return dataclasses.replace(scaler, state=_advance(scaler.rule, scaler.state, *seen))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _advance(rule: Rule, state: ScaleState, nonfinite: Any, amax: Any, blamed: Any) -> ScaleState:
    """Compiled once even where the step is not: a rule is some sixty operations on scalars."""
    return rule.advance(state, Reading(nonfinite, amax, blamed), jnp)


def finish(
    scaler: Scaler,
    reading: Reading,
    kinds: Any,
    parameters: Parameters,
    loss: Any,
    *,
    loss_type: Any = jnp.float32,
    retries: Any = 0,
    bad_loss: Any = -1,
) -> tuple[Scaler, Result]:
    """One step's end: the next scaler, and what the step came to."""
    off = isinstance(scaler.rule, Off)
    after, cause, skipped = advanced(scaler, reading), Cause.NONE, scaler.skipped_steps
    if not off:
        after = after.capped(loss_type)
        known = loss is not None
        cause = cause_of(reading, scaler.state, scaler.rule, loss_known=known, xp=jnp)
        skipped = skipped + ((cause != Cause.NONE) & (cause != Cause.NO_GRADIENTS))
    after = dataclasses.replace(after, counts=StepCounts(scaler.steps + 1, skipped))
    result = Result(
        cause=jnp.asarray(cause, jnp.int32),
        scale=scaler.state.scale,
        next_scale=after.state.scale,
        grad_norm=jnp.asarray(reading.norm, jnp.float32),
        amax=jnp.asarray(reading.amax, jnp.float32),
        loss=jnp.float32(jnp.nan) if loss is None else jnp.asarray(loss, jnp.float32),
        retries=jnp.asarray(retries, jnp.int32),
        skips=scaler.state.skips,
        nonfinite=jnp.asarray(reading.nonfinite, bool),
        kinds=kinds,
        bad_loss=jnp.asarray(bad_loss, jnp.int32),
        rule=scaler.rule,
        parameters=parameters,
        half_loss=not off and loss_type == jnp.float16,
    )
    return after, result


def unscaled(grads: Any, factor: Any) -> Any:
    """The gradients times `factor`, in float32 at least."""

    def one(g: Any) -> Any:
        if getattr(g, "dtype", None) == jax.dtypes.float0:
            return g
        g = jnp.asarray(g)
        return g.astype(jnp.promote_types(g.dtype, jnp.float32)) * factor

    return jax.tree.map(one, grads)

"""`Scaler`, `Result`, and the arithmetic of one step that both routes share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import MisuseError
from ..reading import Reading
from ..rules import Off, Rule, ScaleState, parse
from ..verdict import Cause, cause_of
from . import _axis, _state
from ._inspect import largest, leaves_of, look

HALF_LOSS_CEILING = 2.0**15  # a float16 loss casts the scale itself to float16 in backward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaler:
    """A rule and its state: a pytree whose leaves are the state's seven scalars.

    >>> scaler = Scaler("dynamic:init_scale=8")
    >>> float(scaler.scale(jnp.float16(0.5))), float(scaler.state.scale)
    (4.0, 8.0)
    """

    rule: Rule = dataclasses.field(default="dynamic", metadata={"static": True})  # type: ignore[assignment]
    state: ScaleState = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            object.__setattr__(self, "rule", parse(self.rule))
        if self.state is None:
            object.__setattr__(self, "state", arrays(self.rule.init()))

    def scale(self, loss: Any) -> Any:
        """loss * scale, in float32."""
        if isinstance(self.rule, Off):
            return loss
        wide = checked_loss(loss)
        return wide.astype(jnp.promote_types(wide.dtype, jnp.float32)) * self.used(wide.dtype)

    def used(self, loss_dtype: Any = jnp.float32) -> Any:
        """The scale that a loss of this type can carry: at most 2^15 if it is float16.

        >>> float(Scaler("static:2^16").used(jnp.float32))
        65536.0
        """
        if loss_dtype != jnp.float16 or self.rule.max_scale <= HALF_LOSS_CEILING:
            return self.state.scale
        if self.rule.min_scale > HALF_LOSS_CEILING:
            raise MisuseError(
                f"the loss is float16, which carries a scale of 2^15 at most, and the rule "
                f"'{self.rule}' stays above that: compute the loss in float32"
            )
        return jnp.minimum(self.state.scale, HALF_LOSS_CEILING)

    def capped(self, loss_dtype: Any) -> Scaler:
        """This scaler at the scale that a loss of this type carries."""
        return dataclasses.replace(self, state=self.state._replace(scale=self.used(loss_dtype)))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON: torch's five keys and one of ours, as gradlift.torch saves it.

        >>> Scaler("static:8").state_dict()["scale"]
        8.0
        """
        return _state.save(self.rule, jax.device_get(self.state))

    def load_state_dict(self, data: Any) -> Scaler:
        """A scaler of this rule with the state in `data`, from here or from gradlift.torch.

        Refuses what is damaged or belongs to another rule.

        >>> scaler = Scaler("dynamic").load_state_dict(Scaler("dynamic:init_scale=8").state_dict())
        >>> float(scaler.state.scale)
        8.0
        """
        return dataclasses.replace(self, state=arrays(_state.load(self.rule, data)))


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


class Result(NamedTuple):
    """What a step came to: a small pytree of 0-d arrays.

    >>> import gradlift.jax as gl
    >>> loss, grads, scaler, result = gl.value_and_grad(lambda w: (w * 3.0).sum())(
    ...     gl.Scaler("static:8"), jnp.ones(2))
    >>> bool(result.stepped), float(result.scale)
    (True, 8.0)
    """

    stepped: Any
    """Are the gradients to be applied?"""
    cause: Any
    """Why not: a number of `gradlift.Cause`."""
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


def arrays(state: ScaleState) -> ScaleState:
    """A state as 0-d arrays: float32 and int32, none of them weak."""
    return ScaleState(
        jnp.asarray(state.scale, jnp.float32), *(jnp.asarray(x, jnp.int32) for x in state[1:])
    )


def read(
    scaler: Scaler, grads: Any, loss: Any, axis_name: Any = None, local: Any = None
) -> Reading:
    """What scaled gradients showed. `scaler` is at the scale they carry.

    `local` are this device's own gradients, before the average: they overflow first.
    """
    if isinstance(scaler.rule, Off):
        return Reading(nonfinite=False, amax=jnp.float32(jnp.nan))
    leaves = leaves_of(grads)
    if not leaves:
        return Reading(nonfinite=False, amax=jnp.float32(0), checked=False)
    magnitudes = scaler.rule.magnitudes
    found = look(leaves, 1 / scaler.state.scale, amax=magnitudes and local is None)
    amax = found.amax
    if magnitudes and local is not None:
        top = largest(leaves_of(local))
        top = _axis.largest(jnp.where(jnp.isfinite(top), top, 0), axis_name)
        amax = jnp.where(found.nonfinite, jnp.inf, top)
    dead: Any = False
    if loss is not None:
        dead = ~jnp.isfinite(loss).all()
        if axis_name is not None:
            dead = _axis.largest(jnp.int32(dead), axis_name) > 0
    return Reading(found.nonfinite, amax, dead, norm=found.norm)


def decided(scaler: Scaler, reading: Reading, loss_known: bool) -> tuple[Any, Any]:
    """Is the step applied, and why not."""
    if isinstance(scaler.rule, Off):
        return jnp.ones((), bool), jnp.int32(Cause.NONE)
    number = cause_of(reading, scaler.state, scaler.rule, loss_known=loss_known, xp=jnp)
    cause = jnp.asarray(number, jnp.int32)
    return cause == Cause.NONE, cause


def advanced(scaler: Scaler, reading: Reading) -> Scaler:
    """The scaler after a step that showed `reading`."""
    if isinstance(scaler.rule, Off) or reading.checked is False:
        return scaler
    seen = reading.nonfinite, reading.amax, reading.loss_nonfinite
    return dataclasses.replace(scaler, state=_advance(scaler.rule, scaler.state, *seen))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _advance(rule: Rule, state: ScaleState, nonfinite: Any, amax: Any, dead: Any) -> ScaleState:
    """Compiled once even where the step is not: a rule is some sixty operations on scalars."""
    return rule.advance(state, Reading(nonfinite, amax, dead), jnp)


def finished(
    scaler: Scaler, reading: Reading, loss: Any, retries: Any = 0
) -> tuple[Scaler, Result]:
    """One step's end: the next scaler, and what the step came to."""
    stepped, cause = decided(scaler, reading, loss is not None)
    after = advanced(scaler, reading)
    result = Result(
        stepped,
        cause,
        scaler.state.scale,
        after.state.scale,
        jnp.asarray(reading.norm, jnp.float32),
        jnp.asarray(reading.amax, jnp.float32),
        jnp.float32(jnp.nan) if loss is None else jnp.sum(loss).astype(jnp.float32),
        jnp.asarray(retries, jnp.int32),
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

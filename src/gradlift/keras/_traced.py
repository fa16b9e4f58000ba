"""The end of a step inside a compiled graph, in keras.ops: TensorFlow and JAX share it."""

from __future__ import annotations

import math
from typing import Any

from keras import ops

from ..reading import Reading
from ..rules import Rule, ScaleState
from ..verdict import Cause, cause_of
from ._record import ROWS, Row, Values, counts_of, memory_of, state_of


def settled(
    rule: Rule, values: Values, used: Any, reading: Reading, known: Any, loss: Any, culprit: Any
) -> tuple[Any, Values]:
    """Is the step applied? And what the four variables hold after it.

    `used` is the scale that the gradients carried; `known` tells whether the loss is.
    """
    before = state_of(values._replace(clean=ops.cast(values.clean, "int32")))._replace(scale=used)
    cause = ops.cast(cause_of(reading, before, rule, loss_known=known, xp=ops), "int32")
    after = rule.advance(before, reading, ops)
    counts = counts_of(values.history)
    row = Row(used, after.scale, reading.amax, reading.norm, loss, cause, culprit, after.skips)
    return ops.equal(cause, int(Cause.NONE)), kept(values, after, counts, cause, row)


def nothing(values: Values) -> Values:
    """The variables after a step that had no gradients."""
    state, cause = state_of(values), ops.convert_to_tensor(int(Cause.NO_GRADIENTS), "int32")
    row = Row(state.scale, state.scale, 0.0, math.nan, math.nan, cause, 0, state.skips)
    return kept(values, state, counts_of(values.history), cause, row)


def kept(values: Values, state: ScaleState, counts: Any, cause: Any, row: Row) -> Values:
    """The variables with a new state, one more of `cause`, and one more row."""
    met = ops.cast(ops.equal(ops.arange(len(Cause), dtype="int32"), cause), "int32")
    memory = ops.stack([ops.cast(x, "int32") for x in memory_of(state)])
    place = ops.mod(ops.sum(counts), ROWS)
    here = ops.equal(ops.arange(ROWS, dtype="int32"), ops.cast(place, "int32"))
    numbers = ops.stack([ops.cast(x, "float32") for x in row])
    return Values(
        state.scale,
        state.clean,
        ops.concatenate([memory, counts + met]),
        ops.where(ops.expand_dims(here, 1), numbers, values.ring),
    )

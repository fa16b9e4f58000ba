"""The end of a step inside a compiled graph, in keras.ops: TensorFlow and JAX share it."""

from __future__ import annotations

import math
from typing import Any

from keras import ops

from ...core import HALF_LOSS_CEILING, Cause, cause_of, moved
from ...reading import Reading
from ...rules import Rule
from ..step_record import ROWS, StepRow, Values, counts_of, memory_of, state_of


def finish(
    rule: Rule,
    values: Values,
    used: Any,
    reading: Reading,
    loss: Any,
    *,
    loss_known: Any,
    culprit: Any = 0,
    half_loss: bool,
    bad_loss: Any = 0,
) -> tuple[Any, Values]:
    """Is the step applied? And what the four variables hold after it.

    `used` is the scale that the gradients carried.
    """
    before = state_of(values._replace(clean=ops.cast(values.clean, "int32")))._replace(scale=used)
    cause = cause_of(reading, before, rule, loss_known=loss_known, xp=ops)
    cause = ops.cast(ops.convert_to_tensor(cause), "int32")
    ceiling = HALF_LOSS_CEILING if half_loss else math.inf
    after = moved(rule, before, reading, ceiling=ceiling, xp=ops)
    counts = counts_of(values.history)
    row = StepRow(
        used,
        after.scale,
        reading.amax,
        reading.norm,
        loss,
        cause,
        reading.nonfinite,
        culprit,
        before.skips,
        half_loss,
        bad_loss,
    )
    numbers = ops.stack([ops.cast(ops.convert_to_tensor(x), "float32") for x in row])
    place = ops.cast(ops.mod(ops.sum(counts), ROWS), "int32")
    here = ops.equal(ops.arange(ROWS, dtype="int32"), place)
    met = ops.cast(ops.equal(ops.arange(len(Cause), dtype="int32"), cause), "int32")
    memory = ops.stack([ops.cast(x, "int32") for x in memory_of(after)])
    new = Values(
        after.scale,
        after.clean,
        ops.concatenate([memory, counts + met]),
        ops.where(ops.expand_dims(here, 1), numbers, values.ring),
    )
    return ops.equal(cause, int(Cause.NONE)), new

"""TensorFlow below Keras: eager, in a `tf.function`, compiled by XLA, or on several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ...core import loss_blamed
from ...errors import MisuseError
from ...formats import FP32
from ...reading import Reading
from ..step_record import NO_GRADIENTS, RowReading, Values
from .compiled import finish

_LOSSES = 4  # numbers about losses in a window
_TINY = 1e-20  # a sum of squares below it may have lost digits to float32's underflow


class TensorFlowWindow:
    """What is known of the losses, and of gradients unscaled by hand, since the last step.

    A variable, since loss and step may be traced in different functions. Each replica has its own;
    read outside of them it is their sum.

        0 losses, 1 losses not finite, 2 their total, 3 the first that was not finite (its index
        plus one, 0: none), 4 unscaled by hand?, then a RowReading
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.held = tf.Variable(
                tf.zeros(_LOSSES + 1 + len(RowReading._fields)),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
                name="window",
            )

    def note(self, loss: Any) -> None:
        """What was unscaled before this loss is not of this step."""
        _check_place()
        total = tf.cast(tf.reduce_sum(loss), tf.float32)
        bad = tf.cast(tf.reduce_any(~tf.math.is_finite(loss)), tf.float32)
        before = self.held.read_value()[:_LOSSES]
        first = tf.where(before[3] > 0, 0.0, bad * (before[0] + 1))
        losses = before + tf.stack([1.0, bad, total, first])
        self.held.assign(tf.concat([losses, tf.zeros(1 + len(RowReading._fields))], 0))

    def unscaled(self, inspection: RowReading) -> None:
        """Gradients were unscaled by hand, and this is what they showed before."""
        _check_place()
        several = tf.distribute.get_strategy().num_replicas_in_sync > 1
        if several and not isinstance(self.held, tf.distribute.DistributedValues):
            raise MisuseError(
                "get_unscaled_gradients() notes for each replica what its gradients showed, and "
                "this optimizer was made outside of strategy.scope(), where there is one note for "
                "all: make it inside"
            )
        numbers = tf.stack([1.0, *(tf.cast(x, tf.float32) for x in inspection)])
        self.held.assign(tf.concat([self.held.read_value()[:_LOSSES], numbers], 0))

    def clear(self) -> None:
        self.held.assign(tf.zeros_like(self.held))


new_window = TensorFlowWindow


def _check_place() -> None:
    if tf.distribute.in_cross_replica_context():
        raise MisuseError(
            "losses are scaled and gradients applied by each replica: put the whole step into a "
            "function and call strategy.run(function, args=(batch,))"
        )


def elements(g: Any) -> Any:
    """What there is to look at, in float32. Of a sparse gradient, its rows, repeated or not."""
    return tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float32)


def readable(value: Any) -> bool:
    """Can it be read now, or is this a trace?"""
    return bool(tf.executing_eagerly())


def number(value: Any) -> Any:
    """A variable's value, as a step computes with it."""
    return tf.convert_to_tensor(value, tf.float32)


def read(grads: list[Any], inverse: Any, amax: bool) -> tuple[Any, Any, Any]:
    """Is a gradient not finite? The largest |g|, and the true norm."""
    if not grads:
        return tf.constant(False), tf.zeros(()), tf.zeros(())
    values = [elements(g) for g in grads]
    squares = 2 * tf.add_n([tf.nn.l2_loss(v) for v in values])
    blown = tf.maximum(inverse, 1.0)
    # is_finite, and no comparison: grappler turns "not a < b" into "a >= b", which loses NaN.
    odd = ~tf.math.is_finite(squares * blown * blown) | (squares < _TINY)

    def peak(of: Callable[[Any], Any]) -> Any:
        # The zero is for gradients without elements.
        return tf.reduce_max(tf.stack([tf.zeros(()), *(tf.reduce_max(of(v)) for v in values)]))

    def exactly() -> tuple[Any, Any, Any]:
        finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(v)) for v in values]))
        top = peak(lambda v: tf.where(tf.math.is_finite(v), tf.abs(v), 0.0))
        unit = tf.where(top > 0, top, 1.0)
        share = 2 * tf.add_n([tf.nn.l2_loss(v / unit) for v in values])
        sound = finite & (top * inverse <= FP32.max)
        norm = tf.where(sound, tf.sqrt(share) * (top * inverse), float("nan"))
        return ~sound, top, norm

    def plainly() -> tuple[Any, Any, Any]:
        top = peak(tf.abs) if amax else tf.constant(float("nan"))
        return tf.constant(False), top, tf.sqrt(squares) * inverse

    return tf.cond(odd, exactly, plainly)


def first_bad(grads: list[tuple[int, Any]]) -> Any:
    """The last variable with a bad gradient is the first that backward made so."""

    def kind(index: int, g: Any) -> Any:
        v = elements(g)
        nan = tf.reduce_any(tf.math.is_nan(v))
        finite = tf.reduce_all(tf.math.is_finite(v))
        return tf.where(finite, 0.0, tf.where(nan, -(index + 1.0), index + 1.0))

    kinds = tf.stack([kind(i, g) for i, g in grads])
    return tf.gather(kinds, tf.argmax(tf.abs(kinds)))


def unscaled(g: Any, inverse: Any) -> Any:
    if isinstance(g, tf.IndexedSlices):
        return tf.IndexedSlices(unscaled(g.values, inverse), g.indices, g.dense_shape)
    wide = tf.float64 if g.dtype == tf.float64 else tf.float32
    return tf.cast(g, wide) * tf.cast(inverse, wide)


def apply(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """One step, decided once for all replicas."""
    _check_place()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        seen = _inspected(opt, grads, variables)
        _finish(opt, seen, lambda: _move(opt, grads, variables))
        return

    def everywhere(strategy: Any, grads: list[Any], variables: list[Any]) -> None:
        each = strategy.extended.call_for_each_replica
        found = each(_inspected, args=(opt, grads, variables))
        seen = None if found is None else _together(map(strategy.experimental_local_results, found))
        # Not in a replica's context: there a branch could not reach the others.
        _finish(opt, seen, lambda: each(_move, args=(opt, grads, variables)))

    tf.distribute.get_replica_context().merge_call(everywhere, args=(grads, variables))


def _inspected(opt: Any, grads: list[Any], variables: list[Any]) -> RowReading | None:
    """What this replica's gradients show; None without gradients."""
    marked, overwriting = opt._indexed(grads, variables)
    if not marked and not overwriting:
        return None
    used, factor = _factors(opt)
    now = inspect(marked, overwriting, used, factor, opt._wants_amax)
    *_, by_hand, bad, amax, norm, culprit = tf.unstack(opt._window.held.read_value())
    then = RowReading(bad > 0, amax, norm, culprit).after_clipping(now, tf.where)
    return RowReading(*(tf.where(by_hand > 0, a, b) for a, b in zip(then, now)))


def inspect(
    grads: list[tuple[int, Any]],
    overwriting: list[tuple[int, Any]],
    used: Any,
    factor: Any,
    amax: bool,
) -> RowReading:
    """What gradients show that carry `factor`, of a loss that carried `used`, and `overwriting`,
    which carries no factor."""
    nonfinite, top, norm = read([g for _, g in grads], 1 / factor, amax)
    for _, g in overwriting:
        nonfinite |= ~tf.reduce_all(tf.math.is_finite(elements(g)))
    every = [*grads, *overwriting]
    bad = tf.cond(nonfinite, lambda: first_bad(every), lambda: tf.zeros(()))
    return RowReading(nonfinite, top * (used / factor), norm, bad)


def _factors(opt: Any) -> tuple[Any, Any]:
    """The scale that the loss carried, and what is left of it in the gradients."""
    used = opt._carried(tf.convert_to_tensor(opt.dynamic_scale.value))
    return used, tf.where(opt._window.held.read_value()[_LOSSES] > 0, 1.0, used)


def _together(found: Any) -> RowReading:
    """What several replicas saw. The sum of their gradients is not there yet, nor its norm."""
    nonfinite, amax, norm, bad = (tf.stack(local) for local in found)
    only = norm[0] if norm.shape[0] == 1 else tf.constant(float("nan"))
    worst = tf.gather(bad, tf.argmax(tf.abs(bad)))
    return RowReading(tf.reduce_any(nonfinite), tf.reduce_max(amax), only, worst)


def _move(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    _, factor = _factors(opt)
    grads = opt._mapped(lambda g: unscaled(g, 1 / factor), grads, variables)
    opt.inner_optimizer.apply(grads, variables)


def _finish(opt: Any, seen: RowReading | None, move: Callable[[], Any]) -> None:
    values = Values(*(tf.convert_to_tensor(v.value) for v in opt._kept))
    losses, bad, total, first = tf.unstack(opt._window.held.read_value()[:_LOSSES])
    known = losses > 0
    alone = tf.distribute.get_strategy().num_replicas_in_sync == 1  # else it is a sum of indices
    reading, culprit = NO_GRADIENTS, 0
    if seen is not None:
        level = tf.cast(bad > 0, tf.int32) + tf.cast(known & (bad >= losses), tf.int32)
        blamed = loss_blamed(level, tf.cast(seen.nonfinite, tf.int32))
        reading = Reading(seen.nonfinite, seen.amax, blamed, norm=seen.norm)
        culprit = seen.culprit
    sound, after = finish(
        opt.rule,
        values,
        opt._carried(values.scale),
        reading,
        tf.where(known, total, float("nan")),
        loss_known=known,
        culprit=culprit,
        half_loss=opt._loss_is_half,
        bad_loss=tf.where(losses > 1, first, 0.0) if alone else 0,
    )

    def stay() -> None:
        if opt.drop == "window":
            opt._forget_window()

    if seen is not None:
        tf.cond(sound, lambda: (move(), None)[1], stay)
    for variable, value in zip(opt._kept, after):
        variable.assign(value)
    opt._window.clear()

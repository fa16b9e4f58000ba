"""Two replicas, run as a process of its own: one that overflows skips both, and both keep a scale.

TensorFlow must be told of its devices before it starts. Gradients are not summed up yet where an
optimizer sees them first, so what one replica saw the other does not know.
"""

import json
import math
import tempfile

import tensorflow as tf

CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from helpers.keras import HUGE, bits, lifted, line, weights  # noqa: E402

from gradlift import Cause, read_journal  # noqa: E402
from gradlift.errors import MisuseError  # noqa: E402
from gradlift.keras import LossScaleOptimizer, ScaleLogger  # noqa: E402

BOTH = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
SGD = keras.optimizers.SGD
GOOD, INF, NAN = np.float32(0.5), np.float32(np.inf), np.float32(np.nan)


def started(kind=LossScaleOptimizer, inner=lambda: SGD(1.0), **settings):
    with BOTH.scope():
        w = keras.Variable(np.zeros(2, np.float32), name="w")
        settings = settings or {"initial_scale": 16.0, "dynamic_growth_steps": 3}
        optimizer = kind(inner(), **settings)
        optimizer.build([w])
    return optimizer, w


def stepping(optimizer, w, compiled=True, by_hand=False):
    """step(first, second): true gradients of the two replicas, and their losses."""

    def one(true, loss):
        scale = optimizer.scale_loss(tf.constant(1.0)) / 1.0
        optimizer.scale_loss(loss - 1.0)  # two losses, one of them possibly not finite
        grads = [true * scale]
        if by_hand:
            grads = [tf.clip_by_value(g, -2, 2) for g in optimizer.get_unscaled_gradients(grads)]
        optimizer.apply_gradients(zip(grads, [w]))

    def both(true, loss):
        BOTH.run(one, args=(true, loss))

    both = tf.function(both) if compiled else both

    def step(first, second, losses=(1.0, 1.0)):
        true = [tf.constant([first, 1], tf.float32), tf.constant([second, 1], tf.float32)]
        each = BOTH.experimental_distribute_values_from_function
        both(
            each(lambda c: true[c.replica_id_in_sync_group]),
            each(lambda c: tf.constant(losses[c.replica_id_in_sync_group])),
        )
        return w.numpy().tolist()

    return step


def local(variable):
    """What each replica holds."""
    return [v.numpy().tolist() for v in BOTH.experimental_local_results(variable.value)]


def keras_own_looks_at_the_first_replica_only():
    """Why this file is here. If it fails, Keras has mended it."""
    optimizer, w = started(keras.optimizers.LossScaleOptimizer)
    step = stepping(optimizer, w)
    assert step(GOOD, INF)[0] == -math.inf, w
    assert local(optimizer.dynamic_scale) == [16, 16]


def one_decision_for_both(compiled=True):
    optimizer, w = started()
    step = stepping(optimizer, w, compiled)
    assert step(0.5, 0.25) == [-0.75, -2]
    before = bits(optimizer.inner_optimizer.variables)
    for n, bad in enumerate(((GOOD, INF), (INF, GOOD), (GOOD, NAN)), 1):
        assert step(*bad) == [-0.75, -2], bad
        assert bits(optimizer.inner_optimizer.variables) == before
        assert optimizer.result.cause is Cause.OVERFLOW
        assert optimizer.result.culprits == ("w",)
        assert local(optimizer.dynamic_scale) == [16 / 2**n] * 2
        assert local(w) == [[-0.75, -2]] * 2
    assert step(0.25, 0.25) == [-1.25, -4]
    assert local(optimizer.step_counter) == [1, 1]
    for held in (optimizer.history, optimizer.ring):
        first, second = local(held)
        assert str(first) == str(second)  # with NaN in it
    assert optimizer.counts[Cause.NONE] == 2
    assert optimizer.skipped_steps == 3


def one_decision_without_a_graph():
    one_decision_for_both(compiled=False)


def a_dead_loss_on_the_second_replica():
    optimizer, w = started()
    step = stepping(optimizer, w)
    assert step(NAN, NAN, losses=(1.0, NAN)) == [0, 0]
    assert optimizer.result.cause is Cause.LOSS_NONFINITE
    assert local(optimizer.dynamic_scale) == [16, 16]
    assert step(0.5, 0.5) == [-1, -2]  # forgotten by then
    assert optimizer.result.cause is Cause.NONE


def the_largest_of_both_is_what_a_rule_sees():
    optimizer, w = started(rule="headroom:init_scale=16")
    step = stepping(optimizer, w)
    step(0.5, 3)
    row = optimizer.record.rows(0)[0][1]
    assert row.amax == 3 * 16
    assert math.isnan(row.norm)  # of the sum, which is not there yet


def clipping_and_averages():
    optimizer, w = started(inner=lambda: SGD(1.0, clipvalue=2.0, use_ema=True))
    step = stepping(optimizer, w)
    assert step(8, 0.5) == [-2.5, -2]  # as Keras does it: each replica's own, then the sum
    before = bits(optimizer.inner_optimizer.variables)
    step(8, INF)
    assert bits(optimizer.inner_optimizer.variables) == before


def by_hand():
    optimizer, w = started()
    step = stepping(optimizer, w, by_hand=True)
    assert step(8, 0.5) == [-2.5, -2]
    assert step(0.5, INF) == [-2.5, -2]  # the clip does not hide it
    assert optimizer.result.cause is Cause.OVERFLOW
    assert local(optimizer.dynamic_scale) == [8, 8]
    assert step(0.5, 0.5) == [-3.5, -4]


def fit_and_a_journal():
    """Keras' trainer: a batch of two rows, one a replica; the loss is their mean."""
    with BOTH.scope():
        optimizer = lifted(SGD(2.0))
        model = line(optimizer)
    rows = [0.5, 0.25, 0.5, HUGE, HUGE, 0.5, 0.5, NAN, 0.5, 0.5]
    x = np.float32(rows)[:, None]
    with tempfile.TemporaryDirectory() as folder:
        logger = ScaleLogger(f"{folder}/run.jsonl")
        told = model.fit(x, 0 * x, batch_size=2, shuffle=False, verbose=0, callbacks=[logger])
        steps = read_journal(f"{folder}/run.jsonl").steps
    assert weights(model) == [-0.75 - 1], weights(model)
    causes = [Cause.NONE, Cause.OVERFLOW, Cause.OVERFLOW, Cause.LOSS_NONFINITE, Cause.NONE]
    assert [s.cause for s in steps] == causes
    assert [s.scale for s in steps] == [256, 256, 128, 64, 64]
    assert told.history["skipped"] == [3]
    assert told.history["loss_scale"] == [64]
    assert local(optimizer.dynamic_scale) == [64, 64]


def saved_and_loaded():
    optimizer, w = started()
    step = stepping(optimizer, w)
    step(0.5, INF)
    step(0.5, 0.25)
    store = {}
    optimizer.save_own_variables(store)
    again, v = started()
    again.load_own_variables(store)
    v.assign(w)
    assert bits(again.variables) == bits(optimizer.variables)
    assert local(again.dynamic_scale) == [8, 8]
    assert stepping(again, v)(0.5, 0.5) == step(0.5, 0.5)
    assert bits(again.variables) == bits(optimizer.variables)


def by_hand_with_an_optimizer_of_no_replica():
    """One note for both: the second replica would write over what the first one saw."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=16.0)
    with BOTH.scope():
        w = keras.Variable(np.zeros(2, np.float32), name="w")
        optimizer.build([w])
    step = stepping(optimizer, w, compiled=False, by_hand=True)
    with pytest.raises(MisuseError, match=r"outside of strategy\.scope\(\)"):
        step(INF, GOOD)
    assert w.numpy().tolist() == [0, 0]
    # Without it nothing is noted that could be lost.
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=16.0)
    with BOTH.scope():
        v = keras.Variable(np.zeros(2, np.float32), name="v")
        optimizer.build([v])
    step = stepping(optimizer, v)
    assert step(INF, GOOD) == step(GOOD, INF) == [0, 0]
    assert step(NAN, NAN, losses=(1.0, NAN)) == step(NAN, NAN, losses=(NAN, 1.0)) == [0, 0]
    assert optimizer.counts[Cause.OVERFLOW] == optimizer.counts[Cause.LOSS_NONFINITE] == 2
    assert step(0.5, 0.25) == [-0.75, -2]


def one_decision_under_central_storage():
    """tf.keras refuses this strategy."""
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with central.scope():
        w = keras.Variable(np.zeros(1, np.float32), name="w")
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=16.0)
        optimizer.build([w])

    def one(true):
        optimizer.apply([true * optimizer.scale_loss(tf.constant(1.0))], [w])

    @tf.function
    def both(true):
        central.run(one, args=(true,))

    for pair, kept in (((0.5, 0.25), -0.75), ((GOOD, INF), -0.75), ((INF, GOOD), -0.75)):
        rows = [tf.constant([v], tf.float32) for v in pair]
        each = central.experimental_distribute_values_from_function
        both(each(lambda c, rows=rows: rows[c.replica_id_in_sync_group]))
        assert w.value.numpy().tolist() == [kept], pair
    assert optimizer.counts[Cause.OVERFLOW] == 2
    assert optimizer.get_scale() == 4.0


STORIES = [
    keras_own_looks_at_the_first_replica_only,
    one_decision_for_both,
    one_decision_without_a_graph,
    a_dead_loss_on_the_second_replica,
    the_largest_of_both_is_what_a_rule_sees,
    clipping_and_averages,
    by_hand,
    by_hand_with_an_optimizer_of_no_replica,
    one_decision_under_central_storage,
    fit_and_a_journal,
    saved_and_loaded,
]

if __name__ == "__main__":
    assert BOTH.num_replicas_in_sync == 2
    for story in STORIES:
        story()
        print(json.dumps(story.__name__), flush=True)

"""TensorFlow's own ways: GradientTape, tf.function, XLA, sparse gradients, several replicas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("these are TensorFlow's", allow_module_level=True)

import tensorflow as tf
from helpers import PYTHONPATH
from helpers.keras import bits

from gradlift import Cause
from gradlift.errors import MisuseError
from gradlift.keras import LossScaleOptimizer

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
RUNS = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}
FOLDER = Path(__file__).parent


def runs(*names):
    return pytest.mark.parametrize("run", [RUNS[n] for n in names], ids=names)


def half(x):
    """The product passes through float16 on its way back, as in a mixed model."""

    @tf.custom_gradient
    def through(w):
        def grad(up):
            return tf.cast(tf.cast(up * x, tf.float16), tf.float32)

        return tf.reduce_sum(w * x), grad

    return through


@runs("eager", "graph", "xla")
def test_a_loop_as_keras_3_has_it(run):
    w = keras.Variable(np.zeros(2, np.float32), name="w")
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=2^8,growth_interval=3")

    @run
    def step(x):  # not built before: variables are made while it is traced
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(half(x)(w.value))
        grads = tape.gradient(scaled, [w.value])
        optimizer.apply_gradients(zip(grads, [w]))

    seen = []
    for x in (0.5, 4096, 0.5, np.nan, 0.25, 0.25):
        step(tf.constant([x, 1.0]))
        seen.append((optimizer.result.cause, float(optimizer.loss_scale)))
    assert seen == [
        (Cause.NONE, 256),
        (Cause.OVERFLOW, 128),
        (Cause.NONE, 128),
        (Cause.LOSS_NONFINITE, 128),
        (Cause.NONE, 128),
        (Cause.NONE, 256),
    ]
    assert w.numpy().tolist() == [-1.5, -4]
    assert optimizer.result.grad_norm == pytest.approx((0.25**2 + 1) ** 0.5)


@runs("eager", "graph", "xla")
def test_a_loop_as_tf_keras_had_it(run):
    """get_scaled_loss, get_unscaled_gradients, a clip of one's own, apply_gradients."""
    w = tf.Variable([0.0, 0.0], name="mine")  # TensorFlow's own
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=2^8,growth_interval=2")
    optimizer.build([w])

    @run
    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(half(x)(w))
        true = optimizer.get_unscaled_gradients(tape.gradient(scaled, [w]))
        true = [tf.clip_by_value(g, -2, 2) for g in true]
        optimizer.apply_gradients(zip(true, [w]))
        return true[0]

    assert step(tf.constant([0.5, 3.0])).numpy().tolist() == [0.5, 2]
    step(tf.constant([4096, 1.0]))
    assert optimizer.result.cause is Cause.OVERFLOW  # clipped to 2, and still known
    step(tf.constant([0.25, 1.0]))
    step(tf.constant([0.25, 1.0]))
    assert w.numpy().tolist() == [-1, -4]
    assert float(optimizer.loss_scale) == 256
    assert optimizer.names == [w.name]


@runs("graph")
def test_loss_and_step_in_different_functions(run):
    """What one function notes of the loss, the other one knows."""
    w = tf.Variable([0.0])
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=2^8,growth_interval=1")
    optimizer.build([w])

    @run
    def backward(x, by_hand):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(half(x)(w))
        grads = tape.gradient(scaled, [w])
        return optimizer.get_unscaled_gradients(grads) if by_hand else grads

    @run
    def apply(grads):
        optimizer.apply_gradients(zip(grads, [w]))

    for by_hand in (True, False, True):  # the same `apply`, whatever it was given
        for x in (1.0, np.nan, 1.0):
            apply(backward(tf.constant([x]), by_hand))
    assert w.numpy().tolist() == [-6]
    assert optimizer.counts[Cause.LOSS_NONFINITE] == 3
    assert float(optimizer.loss_scale) == 2.0**14


def test_two_losses_one_step():
    w = tf.Variable([0.0])
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([w])
    with tf.GradientTape() as tape:
        first, second = optimizer.scale_loss(w[0]), optimizer.scale_loss(w[0] * np.nan)
    optimizer.apply(tape.gradient([first, second], [w]), [w])
    assert optimizer.result.cause is Cause.LOSS_NONFINITE


def ops_of(function, *args):
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return {node.op for node in nodes}


PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def test_the_graph_calls_no_python():
    w = keras.Variable(np.ones((4, 2), np.float32))
    inner = SGD(0.1, clipnorm=1.0, gradient_accumulation_steps=2)
    optimizer = LossScaleOptimizer(inner, rule="auto", drop="window", max_consecutive_skips=3)
    optimizer.build([w])

    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(x @ w.value))
        optimizer.apply(tape.gradient(scaled, [w.value]), [w])

    spec = tf.TensorSpec((3, 4), tf.float32)
    found = ops_of(tf.function(step), spec)
    assert "IsFinite" in found or "IsInf" in found  # it is our graph
    assert not found & PYTHON
    peeping = tf.function(lambda x: tf.py_function(lambda x: x, [x], tf.float32))
    assert ops_of(peeping, spec) & PYTHON  # so they would be found


@runs("graph", "xla")
def test_rows_of_an_embedding(run):
    """Sparse gradients stay sparse, and a bad row skips the step."""
    table = keras.Variable(np.zeros((6, 2), np.float32), name="table")
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.build([table])
    kinds = []

    @run
    def step(rows, factor):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.gather(table.value, rows) * factor))
        grads = tape.gradient(scaled, [table.value])
        kinds.append(type(grads[0]))
        optimizer.apply(grads, [table])

    step(tf.constant([1, 3, 3]), tf.constant(0.5))
    assert kinds[-1] is tf.IndexedSlices
    expected = np.zeros((6, 2), np.float32)
    expected[1], expected[3] = -0.5, -1
    assert (table.numpy() == expected).all()
    step(tf.constant([0, 2, 2]), tf.constant(np.inf))
    assert (table.numpy() == expected).all()
    assert not optimizer.result.stepped
    assert optimizer.result.culprits == ("table",)
    step(tf.constant([5, 5, 5]), tf.constant(0.25))
    assert table.numpy()[5].tolist() == [-0.75, -0.75]


def test_an_embedding_in_fit():
    layers = [keras.layers.Embedding(8, 2, embeddings_initializer="zeros", dtype="mixed_float16")]
    model = keras.Sequential(layers)
    optimizer = LossScaleOptimizer(SGD(1.0, clipnorm=1.0), rule="static:2^8")
    model.compile(optimizer, lambda y, p: tf.reduce_sum(p, axis=(1, 2)), jit_compile=False)
    x = np.array([[1, 2], [1, 1]])
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    assert optimizer.counts[Cause.NONE] == 2
    assert np.isfinite(model.get_weights()[0]).all()
    assert (model.get_weights()[0][[1, 2]] < 0).all()


def test_a_tensorflow_checkpoint(tmp_path):
    """tf.train.Checkpoint finds every variable."""

    def started():
        w = keras.Variable(np.ones(2, np.float32))
        optimizer = LossScaleOptimizer(Adam(0.5), rule="auto:init_scale=2^4")
        optimizer.build([w])
        return w, optimizer

    def step(w, optimizer, *true):
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([tf.constant(true, tf.float32) * optimizer.loss_scale], [w])

    w, optimizer = started()
    step(w, optimizer, 1, 2)
    step(w, optimizer, 1, np.inf)
    path = tf.train.Checkpoint(optimizer=optimizer, w=w.value).save(str(tmp_path / "saved"))
    v, again = started()
    tf.train.Checkpoint(optimizer=again, w=v.value).restore(path).assert_consumed()
    assert bits(again.variables) == bits(optimizer.variables)
    for one in ((w, optimizer), (v, again)):
        step(*one, 3, 4)
    assert bits([v, *again.variables]) == bits([w, *optimizer.variables])


def test_apply_outside_of_the_replicas_is_an_error():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        w = keras.Variable(np.zeros(1, np.float32))
        optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
        optimizer.build([w])
        for misplaced in (
            lambda: optimizer.scale_loss(tf.constant(1.0)),
            lambda: optimizer.get_unscaled_gradients([tf.ones(1)]),
            lambda: optimizer.apply([tf.ones(1)], [w]),
        ):
            with pytest.raises(MisuseError, match=r"call strategy\.run\(function"):
                misplaced()


def test_two_replicas_decide_alike():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "mirrored_job.py")],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert "one_decision_for_both" in told
    assert len(told) == 11

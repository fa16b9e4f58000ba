"""`ScaleLogger(sample=, forward=)`: weights and layers, for the doctor."""

import keras
import numpy as np
import pytest

import gradlift
from gradlift.analysis.coverage import coverage
from gradlift.errors import SettingsError
from gradlift.keras import LossScaleOptimizer, ScaleLogger

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def model_of():
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((4,)), dense(8, "relu"), dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="static:8"), "mse")
    return model


def fitted(model, path, epochs=3, **options):
    with gradlift.record(path) as session:
        model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[ScaleLogger(**options)])
    return session


def test_weights_and_layers_are_recorded(tmp_path):
    model = model_of()
    before = keras.ops.convert_to_numpy(model.trainable_variables[0].value)
    run = fitted(model, tmp_path / "run.jsonl", sample=10, forward=X[:8]).run
    assert [look.step for look in run.weights] == [0, 10, 20, 30, 40]
    assert [look.step for look in run.forwards] == [0, 10, 20, 30, 40]
    kernel = run.weights[0].parameters[model.trainable_variables[0].path]
    assert kernel["rms"] == pytest.approx(np.sqrt(np.mean(before**2)), rel=1e-6)
    assert 0 < kernel["update"] < kernel["rms"]
    first = run.forwards[0].modules[model.layers[0].name]
    expected = np.maximum(X[:8] @ before, 0)
    assert first["amax"] == pytest.approx(expected.max(), rel=1e-5)
    assert (first["elements"], first["type"]) == (64, "Dense")
    last, head = run.forwards[-1].modules, model.layers[1].name
    assert last[head]["amax"] != run.forwards[0].modules[head]["amax"]  # of the weights of then


def test_training_is_the_same_with_and_without(tmp_path):
    weights = []
    for options in ({}, {"sample": 3, "forward": X[:8]}):
        model = model_of()
        fitted(model, tmp_path / f"{len(weights)}.jsonl", **options)
        weights.append(model.get_weights())
    for a, b in zip(*weights):
        np.testing.assert_array_equal(a, b)


def test_weights_that_are_not_finite_or_alike_are_seen(tmp_path):
    model = model_of()
    model.layers[0].kernel.assign(np.zeros((4, 8), "float32"))
    model.layers[1].kernel.assign(np.zeros((8, 1), "float32"))
    session = fitted(model, tmp_path / "run.jsonl", sample=5)
    assert "zero-init" in [f.kind for f in session.doctor()]


def test_what_was_looked_at_is_said(tmp_path):
    looked, missing, _ = coverage(fitted(model_of(), tmp_path / "a.jsonl").run)
    assert {"the forward pass", "weights and their updates"} <= set(missing)
    run = fitted(model_of(), tmp_path / "b.jsonl", sample=10, forward=X[:8]).run
    looked, missing, _ = coverage(run)
    assert "the forward pass in 5 of 48 steps" in looked
    assert "weights and their updates in 5 of 48 steps" in looked
    if keras.backend.backend() != "torch":  # whose hooks see the calls
        assert "the order of calls" in missing


def test_a_model_without_a_graph_of_layers_is_named(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = Own()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="static:8"), "mse")
    run = fitted(model, tmp_path / "run.jsonl", sample=10, forward=X[:8]).run
    assert not run.forwards
    assert [e.detail["code"] for e in run.events if e.what == "note"] == ["forward"]
    assert "the forward pass" in coverage(run).not_looked


@pytest.mark.parametrize("sample", [0, -1, True, 2.5, "all"])
def test_a_wrong_number_of_batches_is_refused(sample):
    with pytest.raises(SettingsError, match="sample is"):
        ScaleLogger(sample=sample)

"""Saved, loaded, gone on: the same class, the same rule, the same bits."""

import json

import keras
import numpy as np
import pytest
from helpers.keras import HUGE, NAN, SGD, Adam, bits, fit, lifted, line, output, weights
from keras import ops

import gradlift.numpy
from gradlift import Cause, rules
from gradlift.errors import MisuseError, StateError
from gradlift.keras import LossScaleOptimizer, ScaleLogger

FIRST, THEN = [1, 0.5, HUGE, 2, NAN, 0.25, 1], [0.5, HUGE, HUGE, 1, 2, 3]

keras.saving.register_keras_serializable("line")(output)


def everything(model):
    return bits([*model.variables, *model.optimizer.variables])


def changed(optimizer, place, value):
    """What `save_own_variables` stores, with one value replaced."""
    store = {}
    optimizer.save_own_variables(store)
    store[place] = np.asarray(value, store[place].dtype if place in store else None)
    return store


def number(optimizer, variable):
    return str(next(i for i, v in enumerate(optimizer.variables) if v is variable))


@pytest.mark.parametrize("rule", ["dynamic:growth_interval=2", "auto:init_scale=2^8"])
def test_a_loaded_model_goes_on_where_it_was(rule, tmp_path):
    def inner():
        return Adam(0.01, gradient_accumulation_steps=2)

    through = line(lifted(inner(), rule=rule))
    fit(through, *FIRST)
    fit(through, *THEN)

    model = line(lifted(inner(), rule=rule, max_consecutive_skips=9, name="mine"))
    fit(model, *FIRST)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert type(loaded.optimizer.inner_optimizer) is type(inner())
    assert loaded.optimizer.name == "mine"
    assert loaded.optimizer.rule == model.optimizer.rule
    assert loaded.optimizer.limits.max_consecutive_skips == 9
    assert everything(loaded) == everything(model)
    assert loaded.optimizer.result == model.optimizer.result
    fit(loaded, *THEN)
    assert everything(loaded) == everything(through)
    assert loaded.optimizer.counts == through.optimizer.counts
    assert loaded.optimizer.record.steps == len(FIRST + THEN)


def test_weights_alone_go_on_as_well(tmp_path):
    through = line(lifted(Adam(0.01)))
    fit(through, *FIRST, *THEN)
    model = line(lifted(Adam(0.01)))
    fit(model, *FIRST)
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = line(lifted(Adam(0.01)))
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert everything(fresh) == everything(model)
    fit(fresh, *THEN)
    assert everything(fresh) == everything(through)


def test_a_checkpoint_of_each_epoch_goes_on(tmp_path):
    """ModelCheckpoint saves in the middle of `fit`, where JAX holds the state elsewhere."""
    through = line(lifted(Adam(0.01)))
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    fit(through, *FIRST, epochs=3, callbacks=[ScaleLogger(), saver])
    loaded = keras.models.load_model(tmp_path / "2.keras")
    assert loaded.optimizer.record.steps == 2 * len(FIRST)
    fit(loaded, *FIRST)
    assert everything(loaded) == everything(through)


def test_configs_make_equal_optimizers():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = LossScaleOptimizer(
        Adam(schedule, clipnorm=1.0),
        rule="megatron:hysteresis=4,min_scale=2^-4",
        max_consecutive_skips=7,
        on_floor="warn",
        drop="window",
        name="mine",
    )
    config = optimizer.get_config()
    assert set(config) == {
        "name",
        "inner_optimizer",
        "initial_scale",
        "dynamic_growth_steps",
        "rule",
        "max_consecutive_skips",
        "on_floor",
        "drop",
    }
    text = keras.optimizers.serialize(optimizer)
    assert text["registered_name"] == "gradlift>LossScaleOptimizer"
    for again in (
        LossScaleOptimizer.from_config(optimizer.get_config()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
        keras.optimizers.get(text),
    ):
        assert type(again) is LossScaleOptimizer
        assert again.get_config() == config
        assert again.rule == rules.parse("megatron:hysteresis=4,min_scale=2^-4")
        assert again.inner_optimizer.clipnorm == 1.0


@pytest.mark.parametrize("rule", ["off", "static:2^4", "auto", "mpx", 1024])
def test_every_rule_survives_its_text(rule):
    optimizer = LossScaleOptimizer(SGD(0.1), rule=rule)
    assert LossScaleOptimizer.from_config(optimizer.get_config()).rule == optimizer.rule


def test_keras_own_config_is_understood():
    keras_own = keras.optimizers.LossScaleOptimizer(SGD(0.5), 2.0**6, 7, name="loss_scale")
    ours = LossScaleOptimizer.from_config(keras_own.get_config())
    assert (ours.initial_scale, ours.dynamic_growth_steps, ours.name) == (64, 7, "loss_scale")


def test_keras_own_weights_are_taken(tmp_path):
    """Train with Keras' own, go on with ours: as if it had always been ours."""
    settings = {"initial_scale": 2.0**8, "dynamic_growth_steps": 3}
    rows = [1, 2, HUGE, 0.5]  # no non-finite loss: there the two differ, on purpose
    own = line(keras.optimizers.LossScaleOptimizer(SGD(2.0**-8, momentum=0.5), **settings))
    fit(own, *rows)
    own.save_weights(tmp_path / "own.weights.h5")
    ours = line(LossScaleOptimizer(SGD(2.0**-8, momentum=0.5), **settings))
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "own.weights.h5")
    assert float(ops.convert_to_numpy(ours.optimizer.dynamic_scale.value)) == 2.0**7
    assert int(ours.optimizer.step_counter) == 1
    for model in (own, ours):
        fit(model, 1, 1, 1, HUGE, 1)
    assert weights(ours) == weights(own)
    for name in ("dynamic_scale", "step_counter", "iterations"):
        assert bits([getattr(m.optimizer, name) for m in (ours, own)]) == 2 * bits(
            [getattr(own.optimizer, name)]
        )
    assert ours.optimizer.record.steps == 5  # what it has seen itself


def test_keras_own_scale_out_of_bounds_is_refused(tmp_path):
    own = keras.optimizers.LossScaleOptimizer(SGD(0.5), initial_scale=2.0**15)
    ours = LossScaleOptimizer(SGD(0.5), rule="dynamic:init_scale=2^4,max_scale=2^10")
    w = keras.Variable(np.ones(2, np.float32))
    store = {}
    for optimizer in (own, ours):
        optimizer.build([w])
    own.save_own_variables(store)
    before = bits(ours.variables)
    with pytest.raises(StateError, match=r"scale is 2\^15, outside"):
        ours.load_own_variables(store)
    assert bits(ours.variables) == before


DAMAGE = [
    ("dynamic_scale", np.nan, "is nan at"),
    ("dynamic_scale", 0.0, "finite number above 0"),
    ("dynamic_scale", 48.0, "not a power of two"),
    ("dynamic_scale", 2.0**100, "outside this rule's"),
    ("step_counter", -1, "expected 0 or more"),
    ("history", -np.ones(13), "expected 0 or more"),
    ("history", [0, 1, 0, 0, 0, 5, -7, 0, 0, 0, 0, 0], "counts are negative"),
    ("history", [1, 2], "shape"),
    ("rule", np.frombuffer(b"no such rule", np.uint8), "rule that cannot be read"),
    ("rule", np.frombuffer(b"\xff\xfe", np.uint8), "rule that cannot be read"),
]


@pytest.mark.parametrize(("name", "value", "said"), DAMAGE)
def test_damage_is_refused_and_nothing_changes(name, value, said):
    optimizer = LossScaleOptimizer(Adam(0.1), rule="dynamic:init_scale=2^5")
    w = keras.Variable(np.ones(2, np.float32))
    optimizer.build([w])
    optimizer.scale_loss(np.float32(1))
    optimizer.apply([ops.convert_to_tensor(np.float32([32, 64]))], [w])
    if name == "history":
        value = np.resize(value, len(value) if "shape" in said else optimizer.history.shape[0])
    place = name if name == "rule" else number(optimizer, getattr(optimizer, name))
    store = changed(optimizer, place, value)
    iterations = number(optimizer, optimizer.inner_optimizer._iterations)
    store[iterations] = store[iterations] + 7  # sound, and still not to be taken
    before = bits(optimizer.variables)
    with pytest.raises(StateError, match=said):
        optimizer.load_own_variables(store)
    assert bits(optimizer.variables) == before


def test_a_state_of_another_adapter_is_loaded_and_back():
    """One layout for all: NumPy's scaler stands for the others."""

    def made():
        optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:growth_interval=2")
        w = keras.Variable(np.zeros(1, np.float32))
        optimizer.build([w])
        return optimizer, w

    def steps(optimizer, w, *grads):
        for g in grads:
            scaled = optimizer.scale_loss(np.float32(1))
            optimizer.apply([ops.convert_to_tensor(np.float32([g])) * scaled], [w])

    ours, w = made()
    steps(ours, w, 1, np.inf, 1, np.inf, 1)
    peer = gradlift.numpy.Scaler("dynamic:growth_interval=2")
    peer.load_state_dict(ours.state_dict())
    assert (peer.get_scale(), peer.steps, peer.skipped_steps) == (2.0**14, 5, 2)
    assert peer.state_dict() == ours.state_dict()
    again, v = made()
    steps(again, v, 1, 1, 1, 1)
    again.load_state_dict(json.loads(json.dumps(peer.state_dict())))
    assert again.state_dict() == ours.state_dict()
    assert (again.get_scale(), again.skipped_steps, again.result) == (2.0**14, 2, None)
    again.enforce()  # nothing of the steps before
    for optimizer, weight in ((ours, w), (again, v)):
        steps(optimizer, weight, 1, np.inf)
    assert again.state_dict() == ours.state_dict()
    assert (again.result.cause, again.result.scale) == (Cause.OVERFLOW, 2.0**15)


def test_a_state_that_is_refused_changes_nothing():
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic")
    with pytest.raises(MisuseError, match="before build"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.build([keras.Variable(np.zeros(1, np.float32))])
    before, data = bits(optimizer.variables), optimizer.state_dict()
    for broken in (None, {}, {**data, "scale": np.nan}, gradlift.numpy.Scaler("auto").state_dict()):
        with pytest.raises(StateError):
            optimizer.load_state_dict(broken)
    assert bits(optimizer.variables) == before


def test_what_is_sound_is_taken():
    """The same without the damage: the test above can fail."""
    optimizer = LossScaleOptimizer(Adam(0.1), rule="dynamic:init_scale=2^5")
    optimizer.build([keras.Variable(np.ones(2, np.float32))])
    place = number(optimizer, optimizer.dynamic_scale)
    optimizer.load_own_variables(changed(optimizer, place, 64.0))
    assert float(optimizer.loss_scale) == 64


def test_another_rules_state_is_refused(tmp_path):
    model = line(lifted(rule="dynamic:init_scale=2^8"))
    fit(model, 1, HUGE)
    model.save_weights(tmp_path / "model.weights.h5")
    other = line(lifted(rule="auto"))
    other.optimizer.build(other.trainable_variables)
    before = bits(other.optimizer._variables)
    with pytest.raises(ValueError, match="compile with the rule it was saved with"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert bits(other.optimizer._variables) == before  # Keras loads the inner one by itself
    slower = line(lifted(rule="dynamic:growth_interval=7"))  # other numbers are no other rule
    slower.optimizer.build(slower.trainable_variables)
    slower.load_weights(tmp_path / "model.weights.h5")
    assert float(slower.optimizer.loss_scale) == 2.0**7
    assert slower.optimizer.counts[Cause.NONE] == 1


def test_another_models_state_is_left_out():
    saved, other = LossScaleOptimizer(Adam(0.1)), LossScaleOptimizer(Adam(0.1))
    a, b = keras.Variable(np.ones(2, np.float32)), keras.Variable(np.ones(2, np.float32))
    saved.build([a])
    other.build([a, b])
    store = {}
    saved.save_own_variables(store)
    before = bits(other.variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other.load_own_variables(store)
    assert bits(other.variables) == before
    unbuilt = LossScaleOptimizer(Adam(0.1))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        unbuilt.load_own_variables(store)


def test_a_checkpoint_of_keras_into_a_rule_with_another_memory(tmp_path):
    def model(optimizer):
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile(optimizer, "mse")
        return made

    x, y = np.ones((24, 2), np.float32), np.ones((24, 1), np.float32)
    peer = model(keras.optimizers.LossScaleOptimizer(SGD(0.01)))
    peer.fit(x, y, batch_size=1, verbose=0)
    peer.save_weights(tmp_path / "own.weights.h5")
    ours = model(LossScaleOptimizer(SGD(0.01), rule="auto"))
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "own.weights.h5")
    state = ours.optimizer.record.state
    assert (state.scale, state.clean, state.seen) == (2.0**15, 0, 0)

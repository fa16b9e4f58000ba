"""What Keras' own tests ask of its LossScaleOptimizer, asked of both classes, in our own words.

Keras 3.15: loss_scale_optimizer_test.py, and what multi_optimizer_test.py, swap_ema_weights_test.py
and optimizer_sparse_test.py ask of it. Keras' class cannot `apply` on JAX, and has no
`stateless_apply` on TensorFlow; there only ours is asked.
"""

import json

import keras
import numpy as np
import pytest
from helpers.keras import BACKEND, SGD, bits
from keras import ops

from gradlift.keras import LossScaleOptimizer

KERAS = keras.optimizers.LossScaleOptimizer
WAYS = {
    "tensorflow": [(KERAS, "apply"), (LossScaleOptimizer, "apply")],
    "jax": [
        (KERAS, "stateless"),
        (LossScaleOptimizer, "stateless"),
        (LossScaleOptimizer, "apply"),
    ],
    "torch": [
        (KERAS, "stateless"),
        (KERAS, "apply"),
        (LossScaleOptimizer, "stateless"),
        (LossScaleOptimizer, "apply"),
    ],
}[BACKEND]
START, TRUE = [1.0, 2.0, 3.0, 4.0], [1.0, 6.0, 7.0, 2.0]
STEPPED = [0.5, -1.0, -0.5, 3.0]  # START - 0.5 * TRUE

pytestmark = pytest.mark.filterwarnings(
    # Keras' tests give gradients that no scaled loss made, and scales like 400 and 3.
    "ignore:gradients came before any loss:UserWarning",
    "ignore:.*is not a power of two:UserWarning",
)


def named(kind):
    return "keras" if kind is KERAS else "gradlift"


both = pytest.mark.parametrize("kind", [KERAS, LossScaleOptimizer], ids=named)
all_ways = pytest.mark.parametrize(
    ("kind", "way"), WAYS, ids=[f"{named(kind)}-{way}" for kind, way in WAYS]
)


class Loop:
    """An optimizer with one variable, stepped in one of two ways."""

    def __init__(self, optimizer, way, built=True, overwritten=False):
        self.optimizer, self.way = optimizer, way
        self.variable = keras.Variable(np.float32(START), name="w")
        self.variable.overwrite_with_gradient = overwritten
        if built or way == "stateless":
            optimizer.build([self.variable])

    def step(self, *gradient):
        gradient = ops.convert_to_tensor(np.float32(gradient))
        if self.way == "apply":
            self.optimizer.apply([gradient], [self.variable])
            return self.values
        held = self.optimizer.variables
        moved, kept = self.optimizer.stateless_apply(
            [v.value for v in held], [gradient], [self.variable.value]
        )
        for variable, value in zip([self.variable, *held], [*moved, *kept], strict=True):
            variable.assign(value)
        return self.values

    @property
    def values(self):
        return ops.convert_to_numpy(self.variable.value).tolist()

    @property
    def scale(self):
        return float(ops.convert_to_numpy(self.optimizer.scale_loss(np.float32(1.0))))


@both
def test_a_config_makes_an_equal_optimizer(kind):
    inner = SGD(0.5, momentum=0.06, nesterov=True, weight_decay=0.004)
    optimizer = kind(inner)
    config = json.dumps(optimizer.get_config())
    through_text = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    for again in (
        kind.from_config(optimizer.get_config()),
        keras.saving.deserialize_keras_object(through_text),
    ):
        assert type(again) is kind
        assert json.dumps(again.get_config()) == config
        assert set(dir(again)) == set(dir(optimizer))


@both
def test_the_config_has_four_keys(kind):
    optimizer = kind(SGD(0.5), initial_scale=3.0, dynamic_growth_steps=2, name="mine")
    config = optimizer.get_config()
    inner = config.pop("inner_optimizer")
    assert inner["class_name"] == "SGD"
    assert config == {"name": "mine", "initial_scale": 3.0, "dynamic_growth_steps": 2}
    for other in (KERAS, LossScaleOptimizer):  # so a model may go from either to the other
        again = other.from_config({**config, "inner_optimizer": dict(inner)})
        assert again.get_config() == {**config, "inner_optimizer": inner}


@both
def test_gradients_without_variables(kind):
    if kind is KERAS and BACKEND == "jax":
        pytest.skip("Keras' class cannot do it")
    optimizer = kind(SGD(0.5))
    loop = Loop(optimizer, "apply")
    optimizer.apply([ops.convert_to_tensor(np.float32(TRUE)) * optimizer.initial_scale])
    assert loop.values == STEPPED


@all_ways
def test_a_finite_step(kind, way):
    loop = Loop(kind(SGD(0.5)), way, built=False)
    assert loop.step(*(2.0**15 * np.float32(TRUE))) == STEPPED


@all_ways
@pytest.mark.filterwarnings("ignore:the inner optimizer's loss_scale_factor:UserWarning")
def test_a_scale_of_the_inner_optimizer_does_not_count(kind, way):
    loop = Loop(kind(SGD(0.5, loss_scale_factor=100)), way, built=False)
    assert loop.step(*(2.0**15 * np.float32(TRUE))) == STEPPED


@all_ways
def test_an_infinite_step(kind, way):
    loop = Loop(kind(SGD(0.5)), way, built=False)
    assert loop.step(*[np.inf] * 4) == START


@all_ways
def test_a_variable_that_its_gradient_overwrites(kind, way):
    loop = Loop(kind(SGD(0.5)), way, built=False, overwritten=True)
    assert loop.step(*TRUE) == TRUE


@all_ways
def test_overflows_halve_the_scale(kind, way):
    loop = Loop(kind(SGD(0.5), initial_scale=400.0), way)
    for _ in range(4):
        loop.step(*[np.inf] * 4)
    assert loop.scale == 25.0


@all_ways
def test_clean_steps_double_the_scale(kind, way):
    loop = Loop(kind(SGD(0.5), initial_scale=2.0, dynamic_growth_steps=2), way)
    for _ in range(8):
        loop.step(*TRUE)
    assert loop.scale == 32.0


@all_ways
def test_iterations_count_applied_steps(kind, way):
    loop = Loop(kind(SGD(0.5)), way)
    seen = [int(loop.optimizer.iterations)]
    for gradient in (*[TRUE] * 3, [np.inf] * 4, TRUE):
        loop.step(*gradient)
        seen.append(int(loop.optimizer.iterations))
    assert seen == [0, 1, 2, 3, 3, 4]


@both
def test_dynamic(kind):
    assert kind(SGD(0.5), dynamic=True).initial_scale == 2.0**15
    with pytest.raises(ValueError, match="set `loss_scale_factor`"):
        kind(SGD(0.5), dynamic=False)


@both
def test_unknown_arguments_are_refused(kind):
    with pytest.raises(ValueError, match="arguments: `foo`, `bar`"):
        kind(SGD(0.5), foo=True, bar=3)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_decay", 0.5),
        ("clipnorm", 0.5),
        ("global_clipnorm", 0.5),
        ("clipvalue", 0.5),
        ("use_ema", True),
        ("ema_momentum", 0.5),
        ("ema_overwrite_frequency", 2),
        ("loss_scale_factor", 0.5),
        ("gradient_accumulation_steps", 2),
    ],
)
def test_arguments_of_the_inner_optimizer_are_refused(kind, name, value):
    with pytest.raises(ValueError, match="on the `inner_optimizer`"):
        kind(SGD(0.5), **{name: value})


@both
def test_a_config_that_names_the_defaults_of_a_base_optimizer(kind):
    """Older Keras wrote them."""
    base = dict.fromkeys(
        (
            "weight_decay",
            "clipnorm",
            "global_clipnorm",
            "clipvalue",
            "ema_overwrite_frequency",
            "loss_scale_factor",
            "gradient_accumulation_steps",
        )
    )
    base |= {"use_ema": False, "ema_momentum": 0.99}
    inner = {
        "module": "keras.optimizers",
        "class_name": "SGD",
        "config": {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0, **base},
        "registered_name": None,
    }
    own = {"name": "loss_scale_optimizer", "initial_scale": 2.0, "dynamic_growth_steps": 2}
    optimizer = kind.from_config({**own, **base, "inner_optimizer": inner})
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0, 2)


@all_ways
@pytest.mark.filterwarnings("ignore:the inner optimizer's loss_scale_factor:UserWarning")
def test_around_a_multi_optimizer(kind, way):
    first, rest = SGD(0.5), SGD(0.5)
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(default_optimizer=rest, optimizer_map={"w": first}),
        loss_scale_factor=5.0,
    )
    loop = Loop(kind(several, initial_scale=8.0), way)
    assert {o.loss_scale_factor for o in (several, first, rest)} == {None}
    assert loop.scale == 8.0
    assert loop.step(*(8 * np.float32(TRUE))) == STEPPED


@both
def test_inside_of_a_multi_optimizer_it_is_refused(kind):
    chosen = keras.optimizers.OptimizerMap(default_optimizer=SGD(0.1))
    with pytest.raises(ValueError, match=r"optimizer cannot be LossScaleOptimizer\."):
        chosen[".*"] = kind(SGD(0.1))


@both
def test_averaged_weights_are_swapped_in(kind):
    """evaluate() after fit with SwapEMAWeights sees what its last validation saw."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((10, 3)).astype("float32"), rng.random((10, 2)).astype("float32")
    layer = keras.layers.Dense(2, kernel_initializer="ones", use_bias=False)
    model = keras.Sequential([keras.Input((3,)), layer])
    optimizer = kind(SGD(0.01, use_ema=True, ema_momentum=0.9))
    model.compile(optimizer, "mse", metrics=["mse"])
    swap = keras.callbacks.SwapEMAWeights()
    history = model.fit(x, y, epochs=2, callbacks=[swap], validation_data=(x, y), verbose=0)
    seen = model.evaluate(x, y, return_dict=True, verbose=0)
    assert history.history["val_mse"][-1] == seen["mse"]


def sparse(values, rows, shape):
    """A gradient of some rows."""
    values = ops.convert_to_tensor(np.float32(values))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(values, tf.constant(rows), tf.constant(shape))
    from jax.experimental.sparse import BCOO

    return BCOO((values, np.int32(rows)[:, None]), shape=shape)


with_sparse = pytest.mark.skipif(BACKEND == "torch", reason="Keras has no sparse gradients there")


@with_sparse
@both
def test_a_sparse_gradient_does_what_a_dense_one_does(kind):
    held = []
    for dense in (True, False):
        variable = keras.Variable(np.ones((5, 3, 2), np.float32))
        optimizer = kind(SGD(0.5))
        optimizer.build([variable])
        for i in range(5):
            gradient = sparse(np.ones((3, 3, 2)) * (10.0 - i), (0, 2, 4), (5, 3, 2))
            if dense:
                gradient = ops.convert_to_tensor(gradient, sparse=False)
            if BACKEND == "jax":  # given variables, where others give their values
                held_ones = optimizer.variables
                moved, kept = optimizer.stateless_apply(held_ones, [gradient], [variable.value])
                for v, value in zip([variable, *held_ones], [*moved, *kept], strict=True):
                    v.assign(value)
            else:
                optimizer.apply([gradient], [variable])
        held.append(bits([variable]))
    assert held[0] == held[1]
    assert held[0] != bits([keras.Variable(np.ones((5, 3, 2), np.float32))])


@with_sparse
@all_ways
def test_a_sparse_gradient_reaches_the_variable_as_one(kind, way, monkeypatch):
    """The inner optimizer's update is sparse too; only the rows that have one are written."""
    inner, seen = SGD(0.5), []
    own = inner.assign_sub
    monkeypatch.setattr(
        inner, "assign_sub", lambda v, value: (seen.append(type(value).__name__), own(v, value))
    )
    variable = keras.Variable(np.ones((5, 2), np.float32))
    optimizer = kind(inner)
    optimizer.build([variable])
    gradient = sparse(np.full((3, 2), 2.0**15), (0, 2, 4), (5, 2))
    if way == "stateless":
        values = [v.value for v in optimizer.variables]
        optimizer.stateless_apply(values, [gradient], [variable.value])
    else:
        optimizer.apply([gradient], [variable])
    assert set(seen) == {"IndexedSlices" if BACKEND == "tensorflow" else "BCOO"}

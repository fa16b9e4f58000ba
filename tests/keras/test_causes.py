"""Why a step was skipped, and which tensor, loss or micro-batch shows it."""

import math

import keras
import numpy as np
from helpers.keras import (
    BACKEND,
    NAN,
    OVERFLOW,
    PLAIN,
    SGD,
    fit,
    lifted,
    named,
    output,
    scaled,
    started,
    step,
    tensor,
    variable,
)
from keras import ops

from gradlift import Cause, read_journal
from gradlift.keras import LossScaleOptimizer, ScaleLogger


# Causes and culprits
def test_causes_in_a_loop_of_ones_own():
    """There the loss is seen on every backend."""
    w = variable(1.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=4,min_scale=2")
    optimizer.build([w])
    told = [
        step(optimizer, [w], [0.5]),
        step(optimizer, [w], [NAN]),
        step(optimizer, [w], [NAN], loss=NAN),
        step(optimizer, [w], [NAN]),
        step(optimizer, [w], None),
        step(optimizer, [w], [0.25]),
    ]
    causes = [r.cause for r in told]
    assert causes == [
        Cause.NONE,
        Cause.OVERFLOW,
        Cause.LOSS_NONFINITE,
        Cause.FLOOR,
        Cause.NO_GRADIENTS,
        Cause.NONE,
    ]
    assert [r.scale for r in told] == [4, 4, 2, 2, 2, 2]
    assert optimizer.counts == {c: causes.count(c) for c in Cause}
    assert optimizer.skipped_steps == 3  # a step without gradients is no skip
    assert w.numpy().tolist() == [0.25]
    assert math.isnan(told[1].grad_norm)
    assert str(told[3]) == "skip (floor) at scale 2^1, first non-finite: variable (nan)".replace(
        "variable", optimizer.names[0]
    )


def test_without_the_loss_the_cause_is_unknown():
    """Gradients alone: as every peer does, the scale is lowered."""
    w = variable(1.0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=4")
    optimizer.build([w])
    step(optimizer, [w], [0.5])
    optimizer.apply([ops.convert_to_tensor(np.float32([np.inf]))], [w])
    assert optimizer.result.cause is Cause.UNKNOWN_NONFINITE
    assert float(optimizer.dynamic_scale.value) == 2.0


def test_the_culprit_is_where_backward_first_went_wrong():
    a, b, c = named("a"), named("b"), named("c")
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([a, b, c])
    result = step(optimizer, [a, b, c], [NAN], [np.inf], [1])
    assert result.culprits == ("b",)
    assert result.culprits[0].kind == "inf"
    assert step(optimizer, [a, b, c], [NAN], None, [1]).culprits[0].described == "a (nan)"
    assert step(optimizer, [c, a], [1], [np.inf]).culprits == ("a",)  # some, in another order
    assert step(optimizer, [a, b, c], [1], [1], [1]).culprits == ()


def test_fit_names_the_layer(tmp_path):
    """The first layer's gradient overflows, the second one's does not."""
    optimizer = lifted(SGD(2.0**-20), rule="static:2^8")
    kind = {"use_bias": False, "dtype": "mixed_float16"}
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, name="first", kernel_initializer="zeros", **kind),
            keras.layers.Rescaling(2.0**8, dtype="float32"),
            keras.layers.Dense(1, name="second", kernel_initializer="ones", **kind),
            keras.layers.Rescaling(2.0**-8, dtype="float32"),
        ],
        name="net",
    )
    model.compile(optimizer, output, **PLAIN)
    fit(model, 1.0, 1024.0, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    run = read_journal(tmp_path / "run.jsonl")
    assert run.header["parameters"] == {"net/first/kernel": 1, "net/second/kernel": 1}
    assert run.header["backend"] == BACKEND
    good, bad = run.steps
    assert good.culprits == ()
    assert bad.culprits == ("net/first/kernel",)
    assert bad.nonfinite
    (event,) = run.events
    assert (event.what, event.step, event.detail["cause"]) == ("skip", 1, OVERFLOW.name)
    assert event.detail["culprits"] == ["net/first/kernel (inf)"]


def test_one_of_several_losses_is_the_cause_if_the_gradients_show_it():
    optimizer, (w,) = started()
    optimizer.scale_loss(tensor(np.nan)[0])
    optimizer.apply(scaled(optimizer, np.nan), [w])
    assert optimizer.result.cause is Cause.LOSS_NONFINITE
    assert w.numpy().tolist() == [0]

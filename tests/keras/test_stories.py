"""gradlift.keras as stories: what goes wrong in real runs, and what must come of it."""

import math
import time

import keras
import numpy as np
import pytest
from keras import ops
from line import (
    BACKEND,
    DEAD,
    HUGE,
    LOSS_SEEN,
    NAN,
    OVERFLOW,
    PLAIN,
    WAYS,
    bits,
    fit,
    lifted,
    line,
    output,
    weights,
)

from gradlift import Cause, Journal, Verdict, read_journal, rules
from gradlift.core import Limits
from gradlift.errors import SettingsError, TrainingHalted
from gradlift.journal import Recorder, set_current
from gradlift.keras import LossScaleOptimizer, ScaleLogger

SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW


def variable(*values):
    return keras.Variable(np.array(values, np.float32))


def named(name):
    return keras.Variable(np.zeros(1, np.float32), name=name)


def step(optimizer, variables, *true, loss=1.0):
    """One step by hand: true gradients, each times the scale."""
    optimizer.scale_loss(np.float32(loss))
    scale = ops.convert_to_tensor(optimizer.loss_scale)
    grads = [None if g is None else ops.convert_to_tensor(np.float32(g)) * scale for g in true]
    optimizer.apply(grads, variables)
    return optimizer.result


# What fit does


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_fit_skips_what_overflows_and_tells(how, tmp_path):
    optimizer = lifted()
    model = line(optimizer, **how)
    assert optimizer.result is None
    logger = ScaleLogger(tmp_path / "run.jsonl")
    fit(model, 0.5, 0.25, HUGE, 0.125, NAN, 0.5, callbacks=[logger])

    assert weights(model) == [-(0.5 + 0.25 + 0.125 + 0.5)]
    steps = read_journal(tmp_path / "run.jsonl").steps
    assert [s.cause for s in steps] == [0, 0, OVERFLOW, 0, DEAD, 0]
    after_nan = 128.0 if LOSS_SEEN else 64.0  # a dead loss is not the scale's fault, where known
    assert [s.scale for s in steps] == [256, 256, 256, 128, 128, after_nan]
    assert optimizer.counts[Cause.NONE] == 4
    assert optimizer.counts[OVERFLOW] == (1 if LOSS_SEEN else 2)
    assert sum(optimizer.counts.values()) == 6
    assert optimizer.skipped_steps == 2
    assert int(optimizer.iterations) == 4
    assert float(optimizer.dynamic_scale.value) == after_nan
    result = optimizer.result
    assert (result.verdict, result.cause) == (Verdict.APPLY, Cause.NONE)
    assert (result.scale, result.grad_norm) == (after_nan, 0.5)


def test_the_scale_grows_and_gradients_stay_true():
    """The loss is multiplied by the scale of its own step, and divided by the same one."""
    optimizer = lifted(rule="dynamic:init_scale=2,growth_interval=1")
    model = line(optimizer)
    fit(model, *[1.0] * 6)
    assert weights(model) == [-6.0]
    assert float(optimizer.dynamic_scale.value) == 2.0**7


def test_scaling_saves_what_float16_loses():
    def tiny(y, predicted):
        return output(y, predicted) * 2.0**-14

    rows = [2.0**-12, 2.0**-14]  # gradients of 2^-26 and 2^-28: nothing, in float16
    lost = line(SGD(1.0), loss=tiny, auto_scale_loss=False)
    fit(lost, *rows)
    assert weights(lost) == [0.0]
    model = line(lifted(rule="static:2^14"), loss=tiny)
    fit(model, *rows)
    assert weights(model) == [-(2.0**-26) - 2.0**-28]


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.usefixtures("mixed_float16")
def test_a_mixed_model_is_never_wrapped_twice(auto):
    plain = line(SGD(1.0))
    assert isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)  # that is the danger
    optimizer = lifted()
    model = line(optimizer, auto_scale_loss=auto)
    assert model.optimizer is optimizer
    assert type(optimizer.inner_optimizer).__name__ == "SGD"
    fit(model, 0.5, HUGE, 0.25)
    assert weights(model) == [-0.75]


@pytest.mark.usefixtures("mixed_float16")
def test_a_mixed_network_learns():
    """A real one: the rule finds its scale, and the loss falls to a tenth."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = lifted(AdamW(3e-2), rule="auto")
    model.compile(optimizer, "mse", **PLAIN)
    x = np.random.default_rng(0).standard_normal((256, 8), np.float32)
    y = x[:, :1] - 2 * x[:, 1:2]
    told = model.fit(x, y, epochs=8, verbose=0, callbacks=[ScaleLogger()]).history
    assert told["loss"][-1] < told["loss"][0] / 10
    assert told["loss_scale"][-1] > 2.0**8
    assert sum(told["skipped"]) == optimizer.skipped_steps <= 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_train_on_batch_and_evaluate():
    optimizer = lifted()
    model = line(optimizer)
    for x in (0.5, HUGE, 0.25):
        model.train_on_batch(np.float32([[x]]), np.float32([[0]]))
    assert weights(model) == [-0.75]
    model.evaluate(np.float32([[1]]), np.float32([[0]]), verbose=0)
    assert optimizer.record.steps == 3
    assert optimizer.result.cause is Cause.NONE


def test_fit_with_validation_goes_on_where_it_was():
    optimizer = lifted(rule="static:8")
    model = line(optimizer)
    valid = (np.float32([[1], [1]]), np.float32([[0], [0]]))
    logger = ScaleLogger(every=2)
    told = fit(model, 0.5, NAN, 0.5, epochs=2, validation_data=valid, callbacks=[logger])
    assert told.history["skipped"] == [1, 1]
    assert told.history["val_loss"] == [-1.0, -2.0]
    assert weights(model) == [-2.0]


# What an optimizer keeps to itself

INNER = {
    "sgd": lambda: SGD(0.5, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: AdamW(0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
    "amsgrad": lambda: Adam(0.1, amsgrad=True, global_clipnorm=1.0),
    "lion": lambda: keras.optimizers.Lion(0.1, gradient_accumulation_steps=2, use_ema=True),
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(0.5, momentum=0.9), {".*b": Adam(0.1)})
    ),
}


def plainly(optimizer, variables):
    """A step without any scaling."""
    if BACKEND != "jax":
        return lambda *g: optimizer.apply([ops.convert_to_tensor(np.float32(x)) for x in g])
    import jax

    apply = jax.jit(optimizer.stateless_apply)

    def run(*g):
        held, weights = ([v.value for v in vs] for vs in (optimizer.variables, variables))
        moved, held = apply(held, [np.float32(x) for x in g], weights)
        for v, value in zip([*variables, *optimizer.variables], [*moved, *held], strict=True):
            v.assign(value)

    return run


def two():
    """Two variables, one with a -0.0 that a sum with +0.0 would lose."""
    first, second = np.float32([1, -0.0, 3]), np.float32([[2], [0]])
    return [keras.Variable(first, name="a"), keras.Variable(second, name="b")]


@pytest.mark.parametrize("inner", INNER)
def test_skips_leave_no_trace(inner):
    """Bad steps move not a bit; good ones, between them, are the inner optimizer's own."""
    rng = np.random.default_rng(0)
    grads = [(rng.standard_normal(3), rng.standard_normal((2, 1))) for _ in range(6)]
    plain, peer = INNER[inner](), two()
    plain.build(peer)
    run = plainly(plain, peer)
    ours, pair = LossScaleOptimizer(INNER[inner](), rule="dynamic:init_scale=2^8"), two()
    ours.build(pair)
    held, wanted = [*pair, *ours.inner_optimizer.variables], [*peer, *plain.variables]
    for a, b in grads:
        before = bits(held)
        for bad in ([*a[:2], np.inf], b), (a, b * np.nan):
            assert not step(ours, pair, *bad).stepped
            assert bits(held) == before
        step(ours, pair, a, b)
        run(a, b)
        if BACKEND == "jax":  # compiled as a whole, XLA may contract multiply-adds
            for x, y in zip(held, wanted, strict=True):
                np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=2e-6)
        else:
            assert bits(held) == bits(wanted)
    assert bits(pair) != bits(two())
    assert (ours.counts[Cause.NONE], ours.counts[Cause.OVERFLOW]) == (6, 12)
    assert float(ours.dynamic_scale.value) == 2.0 ** (8 - 12)


@pytest.mark.parametrize(
    ("clip", "moved"),
    [
        ({"clipnorm": 1.0}, [0.6, 0.8, 1.0]),
        ({"global_clipnorm": 6.5}, [1.5, 2.0, 6.0]),
        ({"clipvalue": 3.5}, [3.0, 3.5, 3.5]),
    ],
    ids=str,
)
def test_clipping_sees_true_gradients(clip, moved):
    a, b = variable(0, 0), variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0, **clip), rule="static:2^10")
    optimizer.build([a, b])
    result = step(optimizer, [a, b], [3, 4], [12])
    assert result.grad_norm == 13.0
    np.testing.assert_allclose(-np.concatenate([a.numpy(), b.numpy()]), moved, rtol=1e-6)


@pytest.mark.parametrize(
    ("drop", "moved"),
    [
        ("micro-batch", -(1 + 3) / 2 - (5 + 7) / 2),  # the window waits for one more
        ("window", -(3 + 5) / 2),  # what it had summed up goes as well
    ],
)
@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_a_bad_micro_batch(drop, moved, how):
    optimizer = lifted(SGD(1.0, gradient_accumulation_steps=2), drop=drop)
    model = line(optimizer, **how)
    fit(model, 1, HUGE, 3, 5, 7)
    assert weights(model) == [moved]
    assert int(optimizer.iterations) == (2 if drop == "micro-batch" else 1)
    assert optimizer.skipped_steps == 1


def test_a_window_of_several_optimizers():
    a, b = named("a"), named("b")
    inner = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(1.0, gradient_accumulation_steps=2),
            {"b": SGD(1.0, gradient_accumulation_steps=4)},
        )
    )
    optimizer = LossScaleOptimizer(inner, rule="static:8", drop="window")
    optimizer.build([a, b])
    for g in (1, NAN, 3, 5, 7, 9):
        step(optimizer, [a, b], [g], [g])
    assert a.numpy().tolist() == [-(3 + 5) / 2 - (7 + 9) / 2]
    assert b.numpy().tolist() == [-(3 + 5 + 7 + 9) / 4]


def test_averages_do_not_move_on_a_skip():
    optimizer = lifted(SGD(1.0, use_ema=True, ema_momentum=0.5))
    model = line(optimizer)
    fit(model, 1, HUGE, HUGE, 2)
    # Keras ends `fit` with the average in place of the weights: (-1) / 2 + (-3) / 2.
    assert weights(model) == [-2.0]


def test_schedules_count_applied_updates(tmp_path):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 2], [1.0, 0.5, 0.25])
    optimizer = lifted(SGD(schedule))
    model = line(optimizer)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=1)
    fit(model, 1, HUGE, HUGE, 1, 1, HUGE, 1, callbacks=[logger])
    assert weights(model) == [-(1 + 0.5 + 0.5 + 0.25)]
    assert int(optimizer.iterations) == 4
    rates = [s.lr for s in read_journal(tmp_path / "run.jsonl").steps]
    assert rates == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]  # each as it is after the step


def test_a_rate_that_is_changed_meanwhile_is_journaled(tmp_path):
    def slower(epoch, rate):
        return rate / 2 if epoch else rate

    model = line(lifted(SGD(1.0)))
    callbacks = [
        keras.callbacks.LearningRateScheduler(slower),
        ScaleLogger(tmp_path / "run.jsonl", every=1),
    ]
    fit(model, 1, 1, epochs=3, callbacks=callbacks)
    assert weights(model) == [-(2 + 1 + 0.5)]
    rates = [s.lr for s in read_journal(tmp_path / "run.jsonl").steps]
    assert rates == [1, 1, 0.5, 0.5, 0.25, 0.25]


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


def test_without_the_loss_nobody_is_blamed():
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


# Numbers at the edge


@pytest.mark.parametrize(
    ("rule", "cases"),
    [
        (
            "static:1",
            [
                ([3e19, -4e19], 5e19),  # the squares overflow, the numbers do not
                ([3e-30, 4e-30], 5e-30),  # the squares vanish
                ([3e38, 1.0], 3e38),
                ([0.0, 0.0], 0.0),
            ],
        ),
        ("static:2^40", [([3e-30, 4e-30], 5e-30 * 2.0**-40)]),
        (
            "static:2^-10",
            [
                ([1e36, 1.0], None),  # finite as scaled, not when unscaled
                ([1e34, 1.0], 1e34 * 2.0**10),
            ],
        ),
    ],
)
def test_what_is_used_is_what_is_checked(rule, cases):
    w = variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(0.0), rule=rule)
    optimizer.build([w])
    for scaled, norm in cases:
        optimizer.scale_loss(np.float32(1))
        optimizer.apply([ops.convert_to_tensor(np.float32(scaled))], [w])
        result = optimizer.result
        assert result.stepped is (norm is not None)
        if norm is not None:
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert np.isfinite(w.numpy()).all()


def test_magnitudes_are_taken_as_scaled(tmp_path):
    model = line(lifted(rule="auto:cautious,init_scale=2^8"), inputs=2)
    fit(model, [3, 4], [NAN, 1], callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    clean, bad = read_journal(tmp_path / "run.jsonl").steps
    assert (clean.amax, clean.norm) == (4 * 256, 5)
    assert math.isnan(bad.norm)
    assert clean.loss == 0 if LOSS_SEEN else math.isnan(clean.loss)


def test_empty_and_half_gradients():
    a, b = keras.Variable(np.zeros((0, 3), np.float32)), variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.build([a, b])
    for g, stepped in ([3, 4], True), ([np.inf, 0], False):
        optimizer.scale_loss(np.float32(1))
        half = ops.cast(ops.convert_to_tensor(np.float32(g)) * 8, "float16")
        optimizer.apply([ops.zeros((0, 3)), half], [a, b])
        assert optimizer.result.stepped is stepped
    assert b.numpy().tolist() == [-3, -4]


class HalfLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.cast(ops.mean(y_pred), "float16")


def test_a_float16_loss_carries_two_to_the_fifteen(tmp_path):
    """Backward casts the scale itself to float16: one of 2^20 would be inf."""
    optimizer = lifted(rule="dynamic:init_scale=2^20,growth_interval=2")
    model = HalfLoss(line(optimizer).layers)
    model.compile(optimizer, **PLAIN)
    fit(model, 0.5, 0.25, 0.5, 0.25, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    assert weights(model) == [-1.5]
    assert optimizer.skipped_steps == 0
    assert optimizer.result.scale == 2.0**15
    assert [note.code for note in optimizer.result.notes] == ["half-loss"]
    assert str(optimizer.result).endswith(
        "norm 0.25; loss computed in float16: its scale is capped at 2^15"
    )
    steps = read_journal(tmp_path / "run.jsonl").steps
    assert [(s.scale, s.next_scale) for s in steps] == [(2.0**15, 2.0**15)] * 4
    (note,) = read_journal(tmp_path / "run.jsonl").events
    assert (note.what, note.step, note.detail["code"]) == ("note", 0, "half-loss")


def test_the_scaled_loss_is_wide():
    """4 * 2^15 is inf in float16; and whoever prints it should see a number."""
    optimizer = lifted(rule="static:2^15")
    scaled = optimizer.scale_loss(ops.convert_to_tensor(np.float16(4)))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 2.0**17


def test_off_checks_nothing():
    optimizer = lifted(rule="off")
    loss = ops.convert_to_tensor(np.float32(3))
    assert optimizer.scale_loss(loss) is loss
    model = line(optimizer)
    told = fit(model, 0.5, NAN, callbacks=[ScaleLogger()])
    assert math.isnan(weights(model)[0])
    assert list(told.history) == ["loss"]
    assert not optimizer.dynamic


# Rules, bounds, limits


def test_rules_by_text_number_or_value():
    inner = [SGD(0.1) for _ in range(6)]
    assert LossScaleOptimizer(inner[0]).rule == rules.preset("keras")
    assert LossScaleOptimizer(inner[1], rule="auto").rule == rules.parse("auto:cautious")
    assert LossScaleOptimizer(inner[2], rule=8).rule == rules.Static(8)
    mine = rules.Backoff(init_scale=4)
    assert LossScaleOptimizer(inner[3], rule=mine).rule is mine
    kept = LossScaleOptimizer(inner[4], initial_scale=8.0, dynamic=False)
    assert (kept.rule, kept.dynamic) == (rules.Static(8), False)
    short = LossScaleOptimizer(inner[5], 4.0, 7, "mine")
    assert (short.initial_scale, short.dynamic_growth_steps, short.name) == (4.0, 7, "mine")
    assert short.dynamic


def test_bounds_hold():
    rule = "dynamic:init_scale=8,min_scale=4,max_scale=16,growth_interval=1"
    optimizer = lifted(SGD(2.0**-10), rule=rule)
    model = line(optimizer)
    fit(model, 1, 1, 1)
    assert float(optimizer.dynamic_scale.value) == 16
    fit(model, *[8 * HUGE] * 4)
    assert float(optimizer.dynamic_scale.value) == 4
    assert (optimizer.counts[OVERFLOW], optimizer.counts[Cause.FLOOR]) == (2, 2)
    assert weights(model) == [-3 * 2.0**-10]


@pytest.mark.parametrize("every", [1, 8])
def test_limits_stop_a_run_that_only_skips(every, tmp_path):
    optimizer = lifted(max_consecutive_skips=2)
    model = line(optimizer)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=every)
    with pytest.raises(TrainingHalted, match="3 steps in a row were skipped, since step 1"):
        fit(model, 0.5, NAN, NAN, NAN, 0.5, 0.5, 0.5, 0.5, 0.5, callbacks=[logger])
    looked = {1: 4, 8: 8}[every] if BACKEND != "torch" else 4  # torch need not look
    assert optimizer.record.steps == len(read_journal(tmp_path / "run.jsonl").steps) == looked
    assert weights(model) == [-0.5 * (looked - 3)]
    run = read_journal(tmp_path / "run.jsonl")
    verdicts = [Verdict.APPLY, Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
    assert [s.verdict for s in run.steps] == verdicts + [Verdict.APPLY] * (looked - 4)
    assert [(e.what, e.step) for e in run.events] == [("skip", 1), ("skip", 2), ("halt", 3)]
    assert run.events[-1].detail["culprits"] == ["line/w/kernel (nan)"]


def test_limits_at_the_floor():
    """A look that comes late misses nothing."""
    rows = [0.5, HUGE * 8, 0.5, 0.5]
    rule = "dynamic:init_scale=2,min_scale=2"
    with pytest.raises(TrainingHalted, match=r"could not be applied \(step 1\).*floor"):
        model = line(lifted(rule=rule, on_floor="raise"))
        fit(model, *rows, callbacks=[ScaleLogger(every=8)])
    model = line(lifted(rule=rule, on_floor="warn"))
    with pytest.warns(UserWarning, match=r"smallest scale, 2\^1: .* gradient: line/w/kernel"):
        fit(model, *rows, callbacks=[ScaleLogger(every=8)])
    assert weights(model) == [-1.5]


@pytest.mark.parametrize("how", [how for how in WAYS if "steps_per_execution" not in how], ids=str)
def test_every_step_is_concluded_once(how, tmp_path):
    """By `apply`, in Python, or by the logger; with two loggers and a run around them."""
    optimizer = lifted(max_consecutive_skips=1, on_floor="warn")
    model = line(optimizer, **how)
    with Journal(tmp_path / "around.jsonl") as around:
        set_current(Recorder(around))
        try:
            loggers = [ScaleLogger(tmp_path / f"{n}.jsonl", every=n) for n in (1, 5)]
            fit(model, 0.5, HUGE, 0.5, callbacks=loggers)
            with pytest.raises(TrainingHalted, match="2 steps in a row were skipped, since step 4"):
                fit(model, 0.5, HUGE, HUGE, callbacks=loggers)
        finally:
            set_current(None)
    for name in ("1", "5", "around"):
        run = read_journal(tmp_path / f"{name}.jsonl")
        assert [s.step for s in run.steps] == [0, 1, 2, 3, 4, 5], name
        events = [(e.what, e.step) for e in run.events if e.what not in ("resume", "note")]
        assert events == [("skip", 1), ("skip", 4), ("halt", 5)], name
        assert {s.key for s in run.steps} == {""}
        assert run.header["framework"] == "keras"
        assert run.header["parameters"] == {"line/w/kernel": 1}
    assert optimizer.result.verdict is Verdict.HALT


def test_a_compiled_loop_enforces_what_it_skipped_over():
    """`enforce` concludes all steps since the last call, not the last one alone."""
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([w])
    for g in (1, NAN, NAN, 1):
        step(optimizer, [w], [g])
    optimizer.limits = Limits(max_consecutive_skips=1)
    with pytest.raises(TrainingHalted, match="since step 1"):
        optimizer.enforce()
    optimizer.enforce()  # each step once


def test_a_fit_that_was_interrupted_leaves_nothing_behind(tmp_path):
    """Its last steps are recorded when it goes on; a new logger takes over from an old one."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    model = line(lifted())
    first = ScaleLogger(tmp_path / "first.jsonl", every=8)
    with pytest.raises(KeyboardInterrupt):
        fit(model, *[0.5] * 5, callbacks=[first, Stop()])
    done = model.optimizer.record.steps
    fit(model, 0.5, callbacks=[first])
    found = [s.step for s in read_journal(tmp_path / "first.jsonl").steps]
    assert found == list(range(done + 1))
    with pytest.raises(KeyboardInterrupt):
        fit(model, *[0.5] * 5, callbacks=[first, Stop()])
    before = len(read_journal(tmp_path / "first.jsonl").steps)
    fit(model, 0.5, 0.5, callbacks=[ScaleLogger(tmp_path / "second.jsonl")])
    assert len(read_journal(tmp_path / "first.jsonl").steps) == before
    assert len(read_journal(tmp_path / "second.jsonl").steps) == 2


def test_limits_in_a_loop_of_ones_own():
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8", max_consecutive_skips=1)
    optimizer.build([w])
    step(optimizer, [w], [NAN])
    step(optimizer, [w], None)
    step(optimizer, [w], [1])
    step(optimizer, [w], [NAN])
    with pytest.raises(TrainingHalted, match="2 steps in a row were skipped, since step 3"):
        step(optimizer, [w], [NAN])


# ScaleLogger

# (steps at once, batches between looks). Keras runs torch step by step.
LOOKS = [(1, None), (1, 7), (1, 64)] if BACKEND == "torch" else [(1, 7), (5, None), (5, 64)]


@pytest.mark.parametrize(("together", "every"), LOOKS)
def test_the_journal_is_complete(together, every, tmp_path):
    """However many steps run at once, and however seldom it is looked at."""
    rng = np.random.default_rng(0)
    rows = [HUGE if rng.random() < 0.1 else 0.5 for _ in range(83)]
    optimizer = lifted(SGD(2.0**-8))
    model = line(optimizer, steps_per_execution=together)
    logger = ScaleLogger(tmp_path / "run.jsonl", every=every)
    told = fit(model, *rows, epochs=2, callbacks=[logger]).history
    run = read_journal(tmp_path / "run.jsonl")
    assert [s.step for s in run.steps] == list(range(166))
    assert [s.verdict is Verdict.APPLY for s in run.steps] == [x == 0.5 for x in 2 * rows]
    assert [s.next_scale for s in run.steps[:-1]] == [s.scale for s in run.steps[1:]]
    assert {s.norm for s in run.steps if s.verdict is Verdict.APPLY} == {0.5}
    assert {e.what for e in run.events} == {"skip"}
    assert len(run.events) == run.skipped == 2 * rows.count(HUGE)
    assert all(s.seconds > 0 for s in run.steps)
    assert told["skipped"] == [rows.count(HUGE)] * 2
    assert told["loss_scale"] == [run.steps[82].next_scale, run.steps[-1].next_scale]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras runs torch one step at a time")
def test_steps_that_nobody_could_see_are_told(tmp_path):
    model = line(lifted(), steps_per_execution=70)
    fit(model, *[0.5] * 70, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    run = read_journal(tmp_path / "run.jsonl")
    assert [s.step for s in run.steps] == list(range(6, 70))
    assert run.events[0].detail["text"].startswith("6 steps ran unseen")
    assert run.events[0].detail["code"] == "unseen"


def test_looking_changes_nothing(tmp_path):
    """Nothing but the record of steps, which holds amax too where a journal wants it."""
    ended = []
    for callbacks in ([], [ScaleLogger(tmp_path / "run.jsonl", every=1)], [ScaleLogger(every=3)]):
        optimizer = lifted(SGD(0.1, momentum=0.9))
        model = line(optimizer)
        fit(model, 1, 2, HUGE, 3, NAN, 4, epochs=2, callbacks=callbacks)
        held = [*model.variables, *optimizer.variables]
        ended.append(bits(v for v in held if v is not optimizer.ring))
    assert ended[0] == ended[1] == ended[2]


def test_the_progress_bar_shows_them(capsys):
    model = line(lifted(rule="dynamic:init_scale=2^9"))
    fit(model, 0.5, HUGE, 0.5, verbose=2, epochs=2, callbacks=[ScaleLogger()])
    lines = [text for text in capsys.readouterr().out.splitlines() if "loss" in text]
    assert len(lines) == 2
    for text, scale in zip(lines, ("256.0000", "128.0000")):
        assert "- loss: " in text
        assert f"loss_scale: {scale}" in text
        assert "skipped: 1" in text
        assert "grad_norm: 0.5000" in text


def test_the_progress_bar_shows_them_while_it_moves(capsys):
    model = line(lifted(rule="dynamic:init_scale=2^9"))
    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.06))
    fit(model, 0.5, HUGE, 0.5, 0.5, verbose=1, callbacks=[ScaleLogger(every=1), slow])
    *moving, last = capsys.readouterr().out.split("loss_scale: ")[1:]
    assert moving  # which of them were drawn is up to Keras, and to the clock
    assert all(text.startswith(("512.0000", "256.0000")) for text in moving)
    assert last.startswith("256.0000 - skipped: 1.0000 - grad_norm: 0.5000")


def test_every_epoch_has_all_numbers():
    """An epoch that only skipped has no norm of its own; a table wants a cell all the same."""
    model = line(lifted())
    told = [
        model.fit(np.float32([[x]]), np.float32([[0]]), verbose=0, callbacks=[logger]).history
        for logger in [ScaleLogger()]
        for x in (0.5, HUGE, 0.25)
    ]
    assert [h["grad_norm"] for h in told] == [[0.5], [0.5], [0.25]]
    assert [h["skipped"] for h in told] == [[0], [1], [0]]
    assert [h["loss_scale"] for h in told] == [[256], [128], [128]]


def test_two_fits_one_journal(tmp_path):
    """A second fit goes on: the file is continued, and steps are counted on."""
    path = tmp_path / "runs" / "k.jsonl"
    model = line(lifted())
    logger = ScaleLogger(journal=str(path))
    fit(model, 0.5, HUGE, callbacks=[logger])
    fit(model, 0.5, callbacks=[logger])
    run = read_journal(path)
    assert [s.step for s in run.steps] == [0, 1, 2]
    assert [e.what for e in run.events] == ["skip", "resume"]
    with Journal(tmp_path / "mine.jsonl") as mine:  # one's own is left open
        fit(model, 0.5, callbacks=[ScaleLogger(mine)])
        mine.event("note", text="still open")
    run = read_journal(tmp_path / "mine.jsonl")
    assert ([s.step for s in run.steps], len(run.events)) == ([3], 1)


def test_several_optimizers_have_no_one_rate(tmp_path):
    inner = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(1.0)))
    model = line(lifted(inner))
    fit(model, 0.5, HUGE, 0.5, callbacks=[ScaleLogger(tmp_path / "run.jsonl")])
    assert weights(model) == [-1]
    assert [math.isnan(s.lr) for s in read_journal(tmp_path / "run.jsonl").steps] == [True] * 3


@pytest.mark.parametrize("every", [0, 65, 2.0, True])
def test_every_is_a_number_of_batches(every):
    with pytest.raises(SettingsError, match="from 1 to 64"):
        ScaleLogger(every=every)


# tf.keras' names, on every backend


def test_gradients_unscaled_by_hand():
    w = variable(0, 0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8,growth_interval=1")
    for expected in ([-1.0, -1.0], [-2.0, -2.0]):
        scale = float(optimizer.loss_scale)
        assert float(optimizer.get_scaled_loss(np.float32(0.5))) == 0.5 * scale
        scaled = [ops.convert_to_tensor(np.float32([3 * scale, 4 * scale]))]
        (true,) = optimizer.get_unscaled_gradients(scaled)
        assert ops.convert_to_numpy(true).tolist() == [3, 4]
        optimizer.apply_gradients([(ops.clip(true, -1, 1), w)])
        assert w.numpy().tolist() == expected
    assert float(optimizer.loss_scale) == 32
    assert int(optimizer.dynamic_counter) == 0
    assert optimizer.result.grad_norm == 5  # of what backward gave


def test_a_clip_by_hand_does_not_hide_an_overflow():
    w = variable(0)
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=8")
    optimizer.scale_loss(np.float32(1))
    (true,) = optimizer.get_unscaled_gradients([ops.convert_to_tensor(np.float32([np.inf]))])
    optimizer.apply_gradients([(ops.clip(true, -1, 1), w)])
    assert optimizer.result.cause is Cause.OVERFLOW
    assert w.numpy().tolist() == [0]
    assert float(optimizer.loss_scale) == 4


def test_by_hand_is_for_one_step():
    """After a loop of one's own, `fit` unscales again."""
    optimizer = lifted(rule="static:8")
    model = line(optimizer)
    optimizer.scale_loss(np.float32(1))
    scaled = [ops.convert_to_tensor(np.float32([[8]]))]
    true = optimizer.get_unscaled_gradients(scaled)
    optimizer.apply_gradients(zip(true, model.trainable_variables))
    assert weights(model) == [-1]
    fit(model, 1, 1)
    assert weights(model) == [-3]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras has no stateless_apply there")
def test_values_in_values_out():
    w = variable(1, 2)
    ours = LossScaleOptimizer(Adam(0.5), initial_scale=8.0)
    keras_own = keras.optimizers.LossScaleOptimizer(Adam(0.5), initial_scale=8.0)
    ended = []
    for optimizer in (ours, keras_own):
        optimizer.build([w])
        optimizer.scale_loss(np.float32(1))
        held = [ops.copy(v.value) for v in optimizer.variables]
        for g in ([8, 16], [8, np.inf]):
            grads = [ops.convert_to_tensor(np.float32(g))]
            moved, held = optimizer.stateless_apply(held, grads, [ops.copy(w.value)])
            assert len(held) == len(optimizer.variables)
        where = [i for i, v in enumerate(optimizer.variables) if v is optimizer.dynamic_scale]
        ended.append((ops.convert_to_numpy(moved[0]).tolist(), float(held[where[0]])))
    assert ended[0] == ended[1] == ([1, 2], 4.0)

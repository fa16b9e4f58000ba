"""A result on the host, its lines in a journal, and the limits of a run."""

import functools
import math
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import gradlift.jax as gl
import gradlift.numpy
from gradlift import Cause, Journal, Verdict, read_journal
from gradlift.core import HALF_LOSS, Limits
from gradlift.errors import MisuseError, TrainingHalted
from gradlift.journal import Recorder, channel, set_current

OPT = optax.sgd(0.1)
PARAMS = {"block": [{"w": jnp.ones(3)}, {"w": jnp.ones(2)}], "head": jnp.ones(4)}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
OVERFLOW = {"block": [{"w": jnp.array([1.0, 1e6, 1.0])}, {"w": jnp.ones(2)}], "head": jnp.ones(4)}
NAN = {**GOOD, "block": [GOOD["block"][0], {"w": jnp.array([jnp.nan, jnp.inf])}]}
BOTH = {**OVERFLOW, "head": jnp.array([1.0, 1.0, jnp.nan, 1.0])}


@jax.custom_vjp
def given(params, grads, loss):
    """A loss with these gradients, through float16."""
    return loss


def backward(grads, upstream):
    half = jax.tree.map(lambda g: (g * upstream).astype(jnp.float16).astype(jnp.float32), grads)
    return half, None, None


given.defvjp(lambda params, grads, loss: (loss, grads), backward)


@jax.jit
def explicit(scaler, grads, loss):
    *_, scaler, result = gl.value_and_grad(given)(scaler, PARAMS, grads, loss)
    return scaler, result


@functools.partial(jax.jit, static_argnames="tx")
def wrapped(state, grads, loss, tx):
    found = jax.grad(gl.scaled(given, state))(PARAMS, grads, loss)
    return tx.update(found, state, PARAMS, value=loss)[1]


def results(rule, steps, route):
    """The results of (gradients, loss), one after the other."""
    scaler, tx = gl.Scaler(rule), gl.wrap(OPT, rule)
    state = tx.init(PARAMS)
    for grads, loss in steps:
        if route == "explicit":
            scaler, result = explicit(scaler, grads, jnp.float32(loss))
        else:
            state = wrapped(state, grads, jnp.float32(loss), tx=tx)
            result = state.result
        yield result


ROUTES = pytest.mark.parametrize("route", ["explicit", "wrapped"])


@ROUTES
def test_a_result_tells_on_the_host_what_became_of_the_step(route):
    steps = [(GOOD, 1.0), (OVERFLOW, 1.0), (NAN, 1.0), (NAN, math.nan), (BOTH, 1.0), (GOOD, 1.0)]
    seen = [
        (r.verdict, Cause(int(r.cause)), [c.described for c in r.culprits], int(r.skips))
        for r in results("dynamic:init_scale=16", steps, route)
    ]
    assert seen == [
        (Verdict.APPLY, Cause.NONE, [], 0),
        (Verdict.SKIP, Cause.OVERFLOW, ["block.0.w (inf)"], 0),
        (Verdict.SKIP, Cause.OVERFLOW, ["block.1.w (nan)"], 1),
        (Verdict.SKIP, Cause.LOSS_NONFINITE, ["block.1.w (nan)"], 2),
        (Verdict.SKIP, Cause.OVERFLOW, ["head (nan)", "block.0.w (inf)"], 3),
        (Verdict.APPLY, Cause.NONE, [], 4),
    ]


def test_culprits_of_a_result_are_those_of_its_gradients():
    scaler = gl.Scaler("static:8")
    _, grads, _, result = gl.value_and_grad(given)(scaler, PARAMS, BOTH, jnp.float32(1))
    for found in (result.culprits, gl.culprits(grads), gl.culprits({**grads, "none": None})):
        assert found == ("head", "block.0.w")
        assert [c.kind for c in found] == ["nan", "inf"]
    assert gl.culprits({}) == ()
    assert gl.culprits(jnp.array(jnp.inf)) == ("gradient",)


def test_a_result_goes_where_arrays_go():
    def body(scaler, loss):
        scaler, result = explicit(scaler, GOOD, loss)
        return scaler, result

    losses = jnp.array([1.0, jnp.nan, 1.0])
    _, stacked = lax.scan(body, gl.Scaler("static:8"), losses)
    assert stacked.stepped.tolist() == [True, False, True]
    second = jax.tree.map(lambda x: x[1], stacked)
    assert second.verdict is Verdict.SKIP
    for look in (lambda r: r.verdict, lambda r: r.culprits, lambda r: gl.log(None, r, 0)):
        with pytest.raises(MisuseError, match="holds 3 steps or devices"):
            look(stacked)
        with pytest.raises(MisuseError, match="log_inside"):
            jax.jit(lambda r, look=look: look(r) and r)(second)
    every = jax.vmap(lambda loss: explicit(gl.Scaler("static:8"), GOOD, loss)[1])(losses)
    assert every.kinds.shape == (3, 3)
    assert every.stepped.tolist() == [True, False, True]
    pickled = pickle.loads(pickle.dumps(second))
    donated = jax.jit(lambda r: jax.tree.map(jnp.copy, r), donate_argnums=0)(second)
    for again in (donated, pickled):
        assert again.rule == second.rule
        assert again.verdict is Verdict.SKIP
        assert again.parameters == (("block.0.w", 3), ("block.1.w", 2), ("head", 4))


def test_a_state_keeps_its_structure_whatever_gradients_come():
    """equinox differentiates some of what `init` was given; a scan carries the state all the same.

    Culprits are found by name, and one that `init` never saw has none.
    """
    tx = gl.wrap(OPT, "static:8")
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "n": jnp.arange(2)}
    state = tx.init(params)
    bad = {"a": None, "b": jnp.array([1.0, jnp.inf]), "n": None}
    inner = {k: v for k, v in params.items() if k == "b"}

    def update(state, grads):
        return tx.update(grads, state, {"a": None, **inner, "n": None}, value=1.0)[1]

    after = jax.jit(update)(state, bad)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert after.result.culprits == ("b",)
    after = jax.jit(lambda s, g: tx.update(g, s, g, value=1.0)[1])(state, {"z": bad["b"]})
    assert after.result.culprits == ()
    assert after.result.read(0).reading.nonfinite


def record(path, rule, steps, route, limits=None, **how):
    with Journal(path) as journal:
        for i, result in enumerate(results(rule, steps, route)):
            gl.log(journal, result, i, **how, **({"limits": limits} if limits else {}))
    return read_journal(path)


@ROUTES
def test_the_journal_is_the_reference_adapters(tmp_path, route):
    steps = [(GOOD, 1.0), (OVERFLOW, 1.0), (NAN, 1.0), (NAN, math.nan), (BOTH, 1.0), (GOOD, 1.0)]
    run = record(tmp_path / "jax.jsonl", "auto:init_scale=16", steps, route)
    scaler = gradlift.numpy.Scaler("auto:init_scale=16", journal=tmp_path / "numpy.jsonl")
    for grads, loss in steps:
        scaler.scale(loss)
        named = {
            name: jax.device_get((g * scaler.get_scale()).astype(jnp.float16))
            for name, g in gl.finite_checking.named_leaves(grads)
        }
        scaler.step({}, named, lambda weights, grads: None)
    wanted = read_journal(tmp_path / "numpy.jsonl")
    for name in ("rule", "formats", "parameters"):
        assert run.header[name] == wanted.header[name]
    assert run.header["framework"] == "jax"
    assert [describe(s) for s in run.steps] == [describe(s) for s in wanted.steps]
    assert run.events == wanted.events
    assert run.skipped == 4


def describe(step):
    """Without the time; NaN equals NaN, and norms may differ in the last bit."""
    return [f"{x:.5g}" if isinstance(x, float) else x for x in step._replace(seconds=0)]


@ROUTES
def test_a_halt_is_recorded_and_then_raised(tmp_path, route):
    path = tmp_path / "run.jsonl"
    limits = Limits(max_consecutive_skips=2)
    with pytest.raises(TrainingHalted, match="3 steps in a row were skipped, since step 1") as one:
        record(path, "dynamic:init_scale=16", [(GOOD, 1.0)] + 9 * [(OVERFLOW, 1.0)], route, limits)
    assert "First non-finite gradient: block.0.w" in str(one.value)
    run = read_journal(path)
    assert [s.verdict for s in run.steps] == [
        Verdict.APPLY,
        *2 * [Verdict.SKIP],
        Verdict.HALT,
    ]
    assert [(e.step, e.what) for e in run.events] == [(1, "skip"), (2, "skip"), (3, "halt")]
    scaler = gradlift.numpy.Scaler("dynamic:init_scale=16", max_consecutive_skips=2)
    with pytest.raises(TrainingHalted) as other:
        for grads, loss in [(GOOD, 1.0)] + 9 * [(OVERFLOW, 1.0)]:
            scaler.scale(loss)
            named = gl.finite_checking.named_leaves(grads)
            scaled = {n: jax.device_get((g * scaler.get_scale()).astype("f2")) for n, g in named}
            scaler.step({}, scaled, lambda weights, grads: None)
    assert str(one.value) == str(other.value)


def test_limits_at_the_floor_and_without_a_journal():
    (result,) = results("dynamic:init_scale=1,min_scale=1", [(OVERFLOW, 1.0)], "explicit")
    with pytest.warns(UserWarning, match=r"smallest scale, 2\^0.*gradient: block.0.w") as caught:
        gl.enforce(result, Limits(on_floor="warn"), 0)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="smallest scale"):
        assert gl.log(None, result, 0, limits=Limits(on_floor="warn")).cause is Cause.FLOOR
    with pytest.raises(TrainingHalted, match=r"a step could not be applied \(step 7\)"):
        gl.enforce(result, Limits(on_floor="raise"), 7)
    with pytest.raises(TrainingHalted, match="as low as it may go"):
        gl.log(None, result, 0, limits=Limits(on_floor="raise"))


def test_from_inside_it_is_the_same(tmp_path):
    steps = [(GOOD, 1.0), (OVERFLOW, 1.0), (GOOD, 1.0), (NAN, math.nan)]
    outside = record(tmp_path / "out.jsonl", "dynamic:init_scale=16", steps, "explicit")
    inside = Journal(tmp_path / "in.jsonl")

    def body(scaler, some):
        i, grads, loss = some
        scaler, result = explicit(scaler, grads, loss)
        gl.log_inside(inside, result, i)
        return scaler, None

    grads = jax.tree.map(lambda *g: jnp.stack(g), *(g for g, _ in steps))
    losses = jnp.array([loss for _, loss in steps])
    lax.scan(body, gl.Scaler("dynamic:init_scale=16"), (jnp.arange(4), grads, losses))
    jax.effects_barrier()
    run = read_journal(tmp_path / "in.jsonl")
    assert [describe(s) for s in run.steps] == [describe(s) for s in outside.steps]
    assert run.events == outside.events
    assert run.header["parameters"] == outside.header["parameters"]


def test_a_halt_inside_stops_the_program_and_is_recorded(tmp_path):
    journal = Journal(tmp_path / "run.jsonl")

    def body(scaler, i):
        scaler, result = explicit(scaler, NAN, jnp.float32(1))
        gl.log_inside(journal, result, i, limits=Limits(max_consecutive_skips=2))
        return scaler, None

    with pytest.raises(jax.errors.JaxRuntimeError, match="3 steps in a row were skipped"):
        jax.block_until_ready(lax.scan(body, gl.Scaler(), jnp.arange(50)))
        jax.effects_barrier()
    assert read_journal(journal.path).steps[2].verdict is Verdict.HALT


def test_a_path_is_opened_once_and_a_channel_is_taken_as_it_is(tmp_path):
    path, own = tmp_path / "run.jsonl", tmp_path / "own.jsonl"
    mine = channel("jax", gl.Scaler("static:8").rule, journal=own)
    for i, result in enumerate(results("static:8", 3 * [(GOOD, 1.0)], "explicit")):
        gl.log(str(path), result, i, lr=0.5)
        gl.log(mine, result, i, key="generator")
    run = read_journal(path)
    assert [(s.step, s.lr) for s in run.steps] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert run.events == []
    assert [s.key for s in read_journal(own).steps] == 3 * ["generator"]


def test_a_run_recorded_around_gets_the_lines(tmp_path):
    around, own = Journal(tmp_path / "around.jsonl"), Journal(tmp_path / "own.jsonl")
    made = list(results("static:8", [(GOOD, 1.0), (OVERFLOW, 1.0), (GOOD, 1.0)], "explicit"))
    gl.log(own, made[0], 0)
    set_current(Recorder(around))
    try:
        gl.log(own, made[1], 1)
        gl.log(None, made[2], 2)
    finally:
        set_current(None)
    gl.log(own, made[2], 2)
    assert [s.step for s in read_journal(own.path).steps] == [0, 1, 2]
    seen = read_journal(around.path)
    assert [s.step for s in seen.steps] == [1, 2]
    assert seen.header["framework"] == "jax"


def test_a_float16_loss_is_noted_once(tmp_path):
    run = gl.value_and_grad(lambda w: (w.astype(jnp.float16) * jnp.float16(0.01)).sum())
    scaler = gl.Scaler("dynamic")
    with Journal(tmp_path / "run.jsonl") as journal:
        for i in range(2):
            *_, scaler, result = run(scaler, jnp.ones(2))
            assert gl.log(journal, result, i).notes == (HALF_LOSS,)
    (note,) = read_journal(tmp_path / "run.jsonl").events
    assert (note.what, note.step, note.detail["code"]) == ("note", 0, "half-loss")
    *_, result = run(gl.Scaler("off"), jnp.ones(2))
    assert result.read(0).notes == ()


def test_retries_are_counted_in_the_line(tmp_path):
    run = gl.value_and_grad(given, retries=8)
    *_, result = run(gl.Scaler("dynamic:init_scale=2^20"), PARAMS, GOOD, jnp.float32(1))
    with Journal(tmp_path / "run.jsonl") as journal:
        gl.log(journal, result, 0)
    (step,) = read_journal(tmp_path / "run.jsonl").steps
    assert (step.retries, step.scale, step.verdict) == (5, 2.0**15, Verdict.APPLY)

"""A recorded JAX loop: the findings that its numbers allow, and what was not looked at."""

import jax
import jax.numpy as jnp
import pytest

import gradlift
import gradlift.jax as gl
from gradlift.analysis.coverage import coverage

X = jnp.arange(4.0)


def overflow(w, i):
    return ((w * X).sum() - 1.0) ** 2 * 1e36


LOOPS = {
    "diverging": (lambda w, i: ((w * X).sum() - 1.0) ** 2, 3.0),
    "forward-nan": (lambda w, i: jnp.log((w * X).sum() - 7.0 - 1e3 * (i > 20)), 0.0),
    "start": (overflow, 0.0),
    None: (lambda w, i: ((w * X).sum() - 1.0) ** 2, 0.01),
}


def recorded(path, loss, lr):
    scaler, w = gl.Scaler("torch"), jnp.ones(4)
    with gradlift.record(path) as session:
        for i in range(60):
            _, grads, scaler, result = gl.value_and_grad(loss)(scaler, w, i)
            w = jax.tree.map(lambda p, g: p - lr * jnp.where(lr > 0, g, 0.0), w, grads)
            gl.log(None, result, i, lr=lr)
    return session


@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_what_a_jax_loop_shows(kind, tmp_path):
    session = recorded(tmp_path / "run.jsonl", *LOOPS[kind])
    assert [f.kind for f in session.doctor()][:1] == ([kind] if kind else [])


def test_a_nan_points_to_what_jax_has_for_it(tmp_path):
    [finding] = recorded(tmp_path / "run.jsonl", *LOOPS["forward-nan"]).doctor()
    assert "jax_debug_nans" in finding.advice
    assert "gradlift run" not in finding.advice


def test_what_jax_cannot_show_is_named(tmp_path):
    looked, missing, complete = coverage(recorded(tmp_path / "run.jsonl", *LOOPS[None]).run)
    assert looked == ["the gradients' norm in 60 of 60 steps"]
    assert not complete
    assert missing == [
        "each parameter's gradient",
        "the forward pass",
        "weights and their updates",
        "the order of calls",
    ]

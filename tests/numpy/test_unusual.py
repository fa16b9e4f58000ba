"""Unusual arrays and calls: the step is right, or refused before it writes."""

import math
import os
import sys
import threading

import numpy as np
import pytest
from helpers.numpy import sgd

import gradlift.numpy as gl
from gradlift import Cause, read_journal
from gradlift.errors import SettingsError

LONG = np.finfo(np.longdouble).max > np.finfo(np.float64).max


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def one_step(gradient, weight=None, **how):
    """(result, weight) after one step of w -= g, the gradient given as scaled by 8."""
    weights = {"w": ones(*np.shape(gradient)) if weight is None else weight}
    scaler = gl.Scaler("static:8")
    return scaler.step(weights, {"w": gradient}, sgd, **how), weights["w"]


# Arrays of every make


def views():
    base = np.full((4, 6), 8.0, np.float32)
    yield "a view", base[1:3]
    yield "strided", base[::2, ::3]
    yield "reversed", base[::-1, ::-1]
    yield "transposed", base.T
    yield "expanded", np.broadcast_to(np.float32(8.0), (4, 2))
    yield "Fortran order", np.asfortranarray(base)
    yield "big-endian", base.astype(">f4")
    yield "float16, big-endian", base.astype(">f2")
    yield "float64", base.astype(np.float64)
    yield "longdouble", base.astype(np.longdouble)
    yield "unaligned", np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(np.float32)
    yield "read-only", (base.setflags(write=False), base)[1]
    yield "0-d", np.array(8.0, np.float16)
    yield "a scalar", np.float64(8.0)
    yield "a number", 8.0
    yield "a list", [[8.0, 8.0], [8.0, 8.0]]
    yield "a subclass", np.full(3, 8.0).view(type("Mine", (np.ndarray,), {}))
    yield "empty", np.zeros((0, 3), np.float32)


@pytest.mark.parametrize(("make", "gradient"), [*views()], ids=[name for name, _ in views()])
def test_arrays_of_every_make_are_unscaled_rightly(make, gradient):
    result, weight = one_step(gradient)
    assert result.stepped
    assert not weight.any()
    if not np.size(gradient):
        return
    for bad in (math.inf, math.nan):
        spoiled = np.array(gradient)
        spoiled[(0,) * spoiled.ndim] = bad
        result, weight = one_step(spoiled)
        assert (result.stepped, result.culprits) == (False, ("w",))
        assert (weight == 1.0).all()


@pytest.mark.skipif(not LONG, reason="this platform's longdouble is float64")
def test_a_longdouble_beyond_float64_is_an_overflow():
    result, weight = one_step(np.array([1.0, 1.0]).astype(np.longdouble) * np.longdouble("1e4000"))
    assert (result.stepped, result.culprits) == (False, ("w",))
    assert (weight == 1.0).all()


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (np.ma.MaskedArray([8.0, 8.0], mask=[True, False]), "'w' is a masked array"),
        (np.zeros(2, [("a", np.float32)]), "'w' is .*expected a real floating-point array"),
        (np.rec.array([(1.0,)], dtype=[("a", np.float32)]), "'w' is .*expected a real"),
        (np.array([1.0, None], object), "'w' is object"),
        (np.array(["1.0"]), "'w' is <U3"),
        (np.array([True]), "'w' is bool"),
        (np.array([1j]), "'w' is complex128"),
        (np.array(["2026-01-01"], "datetime64[D]"), "'w' is datetime64"),
        ([np.ones(2), np.ones(3)], "'w' is no array"),
        (3, "'w' is int64"),
    ],
)
def test_arrays_that_are_no_gradients_are_refused_in_words(gradient, words):
    weight = ones(2)
    with pytest.raises(SettingsError, match=words):
        one_step(gradient, weight)
    assert (weight == 1.0).all()


def test_a_memory_mapped_gradient_and_weight(tmp_path):
    weight = np.memmap(tmp_path / "w", np.float16, "w+", shape=4)
    weight[:] = 1.0
    np.full(4, 8.0, np.float16).tofile(tmp_path / "g")
    gradient = np.memmap(tmp_path / "g", np.float16, "r", shape=4)
    masters = gl.Masters({"w": weight})
    assert gl.Scaler("static:8").step(masters, {"w": gradient}, sgd).stepped
    assert not np.fromfile(tmp_path / "w", np.float16).any()


def test_dtypes_mixed_in_one_step():
    kinds = (np.float16, np.float32, np.float64, np.longdouble, np.dtype(">f8"))
    weights = {str(i): ones(2) for i in range(len(kinds))}
    grads = {str(i): np.full(2, 8.0, kind) for i, kind in enumerate(kinds)}
    scaler = gl.Scaler("static:8")
    assert scaler.step(weights, {**grads, "none": None}, sgd).stepped
    assert not any(w.any() for w in weights.values())
    grads["2"][1] = 1e39
    assert scaler.step(weights, grads, sgd).culprits == ("2",)


# Names and mappings


def test_names_that_look_the_same_are_each_checked():
    weights, grads = {1: ones(1), "1": ones(1)}, {1: np.float32([math.nan]), "1": np.float32([8.0])}
    result = gl.Scaler("static:8").step(weights, grads, sgd)
    assert not result.stepped
    assert (weights[1], weights["1"]) == (1.0, 1.0)


def test_a_mapping_is_read_once():
    class Lazy(dict):
        reads = 0

        def items(self):
            self.reads += 1
            return {"w": np.float32([8.0 if self.reads == 1 else math.nan])}.items()

    weights, grads = {"w": ones(1)}, Lazy(w=None)
    assert gl.Scaler("static:8").step(weights, grads, sgd, max_norm=10.0).stepped
    assert weights["w"] == 0.0


def test_a_gradient_that_is_the_weight_itself():
    weight = ones(3)
    result, weight = one_step(weight, weight)
    assert result.stepped
    assert (weight == 0.875).all()


# Numbers at the ends


def test_a_clipped_gradient_of_a_huge_scale_is_not_lost():
    """1/scale x the clip coefficient is below float32's range, their product with g is not."""
    scaler = gl.Scaler("static:2^120")
    weights, clipped = {"w": np.zeros(1, np.float32)}, np.float32(2.0**-40)
    scaler.step(weights, {"w": np.float32([2.0**120])}, sgd, max_norm=float(clipped))
    assert weights["w"][0] == pytest.approx(-clipped, rel=1e-6, abs=0)


# Masters


def test_tied_weights_have_one_master():
    weight = ones(2, dtype=np.float16)
    masters = gl.Masters({"head": weight, "embedding": weight})
    grads = {"head": np.float16([8.0, 0.0]), "embedding": np.float16([0.0, 16.0])}
    assert gl.Scaler("static:8").step(masters, grads, sgd).stepped
    assert weight.tolist() == [0.0, -1.0]
    masters["head"] = masters["head"] + 1  # the other name keeps the old one
    with pytest.raises(SettingsError, match="two masters that differ"):
        masters.write_back()
    assert weight.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (np.ones(2), "is float64, expected an array of float16 or float32"),
        (np.ones(2, np.int8), "is int8"),
        (np.ones(2, complex), "is complex128"),
        (np.zeros(2, [("a", np.float16)]), "expected an array of float16"),
        (np.broadcast_to(np.float16(1), 3), "and read-only"),
        (np.ma.ones(2, np.float16), "is a MaskedArray"),
        (np.float16(1), "is a float16"),
        ([1.0], "is a list"),
    ],
)
def test_weights_that_masters_cannot_be_written_back_into_are_refused(weight, words):
    with pytest.raises(SettingsError, match=words):
        gl.Masters({"w": weight})


def test_weights_that_overlap_are_refused_and_interleaved_ones_are_not():
    base = ones(8, dtype=np.float16)
    with pytest.raises(SettingsError, match="shares memory with another one"):
        gl.Masters({"a": base[:5], "b": base[4:]})
    masters = gl.Masters({"a": base[::2], "b": base[1::2]})
    grads = {"a": np.full(4, 8.0), "b": np.full(4, 16.0)}
    assert gl.Scaler("static:8").step(masters, grads, sgd).stepped
    assert base.tolist() == [0.0, -1.0] * 4


def test_a_master_of_another_shape_or_name_writes_nothing_back():
    for name, value in (("w", np.float32(3)), ("new", ones(2))):
        weight = ones(2, dtype=np.float16)
        masters = gl.Masters({"a": ones(2, dtype=np.float16), "w": weight})
        masters["a"] += 1
        masters[name] = value
        with pytest.raises(SettingsError, match=f"the master '{name}' has the shape"):
            masters.write_back()
        assert (masters.weights["a"] == 1).all()
        assert (weight == 1).all()


@pytest.mark.parametrize("weight", [np.asfortranarray(np.ones((2, 3), np.float16)), ones(0, 2)])
def test_masters_of_fortran_order_and_of_nothing(weight):
    masters = gl.Masters({"w": weight.astype(np.float16, order="K")})
    gradient = np.arange(weight.size, dtype=np.float32).reshape(weight.shape) * 8
    assert gl.Scaler("static:8").step(masters, {"w": gradient}, sgd).stepped
    assert (masters.weights["w"] == 1 - gradient / 8).all()


# Calls


def test_an_update_that_raises_half_way_says_so_and_can_be_repeated():
    weights, scaler = {"a": ones(1), "b": ones(1)}, gl.Scaler("static:8")
    grads = {name: np.float32([8.0]) for name in weights}

    def half(weights, grads):
        weights["a"] -= grads["a"]
        raise MemoryError("no room")

    scaler.scale(1.0)
    with pytest.raises(MemoryError) as seen:
        scaler.step(weights, grads, half)
    if sys.version_info >= (3, 11):  # before it is a warning
        assert "changed in part" in seen.value.__notes__[0]
    assert (weights["a"], weights["b"], scaler.steps) == (0.0, 1.0, 0)
    assert scaler.step(weights, grads, sgd).stepped
    assert scaler.steps == 1


def test_a_state_loaded_in_the_middle_of_a_window():
    scaler, weights = gl.Scaler("dynamic:init_scale=8"), {"w": ones(1)}
    saved = scaler.state_dict()
    scaler.step(weights, {"w": np.float32([math.inf])}, sgd)
    assert scaler.get_scale() == 4.0
    scaler.scale(math.nan)  # of a batch that is given up
    scaler.load_state_dict(saved)
    scaler.scale(1.0)
    assert scaler.step(weights, {"w": np.float32([8.0])}, sgd).stepped
    assert weights["w"] == 0.0
    scaler.scale(math.nan)
    scaler.load_state_dict(saved)
    scaler.scale(1.0)
    assert scaler.step(weights, {"w": np.float32([math.inf])}, sgd).cause is Cause.OVERFLOW


def test_parameters_frozen_and_added_in_mid_run():
    scaler, weights = gl.Scaler("static:8"), {"a": ones(1)}
    scaler.step(weights, {"a": None}, sgd)
    assert not scaler.result.stepped  # there was nothing to apply
    weights["b"] = ones(1)
    assert scaler.step(weights, {"a": None, "b": np.float32([8.0])}, sgd).stepped
    assert (weights["a"], weights["b"]) == (1.0, 0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_the_first_step_trains_on_and_writes_no_line(tmp_path):
    scaler, weights = gl.Scaler("static:8", journal=tmp_path / "run.jsonl"), {"w": ones(1)}
    scaler.step(weights, {"w": np.float32([4.0])}, sgd)
    child = os.fork()
    if not child:
        stepped = scaler.step(weights, {"w": np.float32([4.0])}, sgd).stepped
        os._exit(0 if stepped and weights["w"] == 0.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert weights["w"] == 0.5
    scaler.step(weights, {"w": np.float32([4.0])}, sgd)
    assert [step.step for step in read_journal(tmp_path / "run.jsonl").steps] == [0, 1]


def test_threads_side_by_side_each_with_its_scaler():
    found = {}

    def train(i):
        scaler, weights = gl.Scaler("dynamic:init_scale=8"), {"w": np.zeros(4, np.float32)}
        for n in range(200):
            bad = n % 5 == i % 5
            with np.errstate(all="ignore"):
                scaled = np.float16(np.full(4, math.inf if bad else 1.0) * scaler.get_scale())
            scaler.step(weights, {"w": scaled}, sgd)
        found[i] = scaler.skipped_steps, weights["w"].tolist()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: (40, [-160.0] * 4) for i in range(4)}

"""Formats against two independent sources: numpy.finfo and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from gradlift import formats
from gradlift.errors import SettingsError

ORACLE = {
    "FP64": np.float64,
    "FP32": np.float32,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}
everyone = pytest.mark.parametrize("f", formats.ALL, ids=lambda f: f.name)


def finfo(f):
    dtype = ORACLE[f.name]
    return np.finfo(dtype) if f.name in ("FP64", "FP32", "FP16") else ml_dtypes.finfo(dtype)


def test_every_format_has_an_oracle():
    assert {f.name for f in formats.ALL} == set(ORACLE)


@everyone
def test_limits(f):
    info = finfo(f)
    assert f.max == float(info.max)
    assert f.smallest_normal == float(info.smallest_normal)
    assert f.smallest_subnormal == float(info.smallest_subnormal)
    assert f.eps == float(info.eps)
    assert f.bits == info.bits


@everyone
def test_flushes_and_overflows_are_what_a_cast_does(f):
    rng = np.random.default_rng(0)
    edges = [f.max, f.max * (1 + f.eps / 4), f.max * (1 + f.eps / 2), f.smallest_subnormal]
    edges += [f.max + 2.0 ** (f.max_exponent - 1) * f.eps, f.smallest_subnormal / 2]
    edges += [f.smallest_subnormal * 0.51, f.smallest_subnormal * 0.49, 0.0]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exponents = rng.uniform(np.log2(f.smallest_subnormal) - 3, f.max_exponent + 3, 3000)
        x = np.concatenate([2.0**exponents, np.array(edges)])
        x = np.concatenate([x, -x])
        cast = x.astype(ORACLE[f.name]).astype(np.float64)
    assert (f.flushes(x) == ((cast == 0) & (x != 0))).all()
    assert (f.overflows(x) == ~np.isfinite(cast)).all()
    assert f.name == "FP64" or f.overflows(x).any()
    assert f.name == "FP64" or f.flushes(x).any()
    assert [f.flushes(float(v)) for v in x] == f.flushes(x).tolist()
    assert [f.overflows(float(v)) for v in x] == f.overflows(x).tolist()


def test_find():
    assert formats.find("bfloat16") is formats.BF16
    with pytest.raises(SettingsError, match="no number format is called 'fp12'; there are fp64"):
        formats.find("fp12")

"""That a float32 scale behaves like its exponent, in z3's theory of floating-point numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import z3

from gradlift.namespace import NOTHING, ONE_BIT, UNKNOWN

from .symbols import exponent

F32 = z3.Float32()
ROUND = z3.RNE()


def number(bits: Any) -> Any:
    return z3.fpBVToFP(bits, F32)


def power(e: Any) -> Any:
    """2^e for a 32-bit e, as `pow2` makes it: from bits."""
    return number((e + 127) * 2**23)


def constant(e: int) -> Any:
    return z3.FPVal(2.0**e, F32)


def claims(rules: list[Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """(what, what must hold, assumptions)."""
    e = z3.BitVec("e", 32)
    inside = [e >= -126, e <= 126]
    bits = (e + 127) * 2**23
    yield "pow2(e) is finite, above 0 and a normal number", z3.fpIsNormal(power(e)), inside
    yield "log2(2^e) is 256 e", bits / 2**15 + NOTHING == e * ONE_BIT, inside
    x = z3.BitVec("x", 32)
    log = x / 2**15 + NOTHING  # bits // 2^15 of a number that is not negative
    normal = [x >= 2**23, x < 0x7F800000]
    low = (x / 2**23) * 2**23
    yield "2^(log2(x) // 256) <= x", z3.fpLEQ(number(low), number(x)), normal
    yield "log2 of a finite x is known", log < UNKNOWN, [x >= 0, x < 0x7F800000]
    yield "log2 of inf and NaN is unknown", log >= UNKNOWN, [x >= 0x7F800000, x >= 0]
    yield "log2 of 0 is nothing", log == NOTHING, [x == 0]
    seen = set()
    for rule in rules:
        low_e, high_e = exponent(rule.min_scale), exponent(rule.max_scale)
        for factor, bound in ((rule.growth_factor, high_e), (rule.backoff_factor, low_e)):
            k = exponent(factor)
            if (k, bound) in seen:
                continue
            seen.add((k, bound))
            product = z3.fpMul(ROUND, power(e), constant(k))
            limit = constant(bound)
            if k > 0:
                got = z3.If(z3.fpLEQ(product, limit), product, limit)
                want = power(z3.If(e + k <= bound, e + k, bound))
            else:
                got = z3.If(z3.fpGEQ(product, limit), product, limit)
                want = power(z3.If(e + k >= bound, e + k, bound))
            yield f"2^e * 2^{k}, bounded by 2^{bound}, is exact", z3.fpEQ(got, want), inside

"""A namespace of z3 expressions: `rule.advance(state, reading, SYMBOLS)` gives formulas.

A scale is the exponent of a power of two, everything else an integer. That a float32 scale behaves
like its exponent is itself proved, in `floats.py`. Every integer that is computed is noted, so that
it can be shown to fit 32 bits, which it has on devices.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import z3

from gradlift.namespace import ONE_BIT

LEAST, MOST = -(2**31), 2**31 - 1


class Integer:
    """A whole number; `Integer.computed` are all that were made by arithmetic."""

    computed: ClassVar[list[Any]] = []

    def __init__(self, value: Any) -> None:
        self.z = z3.IntVal(value) if isinstance(value, int) else value

    def _made(self, value: Any) -> Integer:
        Integer.computed.append(value)
        return Integer(value)

    def __add__(self, other: Any) -> Integer:
        return self._made(self.z + whole(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Integer:
        return self._made(self.z - whole(other))

    def __rsub__(self, other: Any) -> Integer:
        return self._made(whole(other) - self.z)

    def __mul__(self, other: Any) -> Integer:
        return self._made(self.z * whole(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Integer:
        assert other > 0  # z3 rounds down for a positive divisor, as Python does
        return self._made(self.z / other)

    def __le__(self, other: Any) -> Any:
        return self.z <= whole(other)

    def __lt__(self, other: Any) -> Any:
        return self.z < whole(other)

    def __ge__(self, other: Any) -> Any:
        return self.z >= whole(other)

    def __gt__(self, other: Any) -> Any:
        return self.z > whole(other)

    def __eq__(self, other: object) -> Any:
        return self.z == whole(other)

    __hash__ = None  # type: ignore[assignment]


class Power:
    """A scale: 2^e."""

    def __init__(self, e: Any) -> None:
        self.z = z3.IntVal(e) if isinstance(e, int) else e

    def __mul__(self, factor: float) -> Power:
        return Power(self.z + exponent(factor))

    def __le__(self, other: Any) -> Any:
        return self.z <= (other.z if isinstance(other, Power) else math.floor(math.log2(other)))

    def __lt__(self, other: Power) -> Any:
        return self.z < other.z

    def __gt__(self, other: Power) -> Any:
        return self.z > other.z


class Magnitude:
    """The largest gradient: `z` is what `log2` makes of it."""

    def __init__(self, z: Any) -> None:
        self.z = z


def exponent(x: float) -> int:
    mantissa, e = math.frexp(x)
    assert mantissa == 0.5, f"{x} is no power of two"
    return e - 1


def whole(x: Any) -> Any:
    return x.z if isinstance(x, Integer) else x


def truth(x: Any) -> Any:
    return z3.BoolVal(x) if isinstance(x, bool) else x


class Symbols:
    """The ten functions of a namespace, on formulas."""

    __name__ = "z3"

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Power) or isinstance(b, Power):
            return Power(z3.If(truth(condition), self._power(a).z, self._power(b).z))
        if isinstance(a, (bool, z3.BoolRef)) or isinstance(b, (bool, z3.BoolRef)):
            return z3.If(truth(condition), truth(a), truth(b))
        return Integer(z3.If(truth(condition), whole(a), whole(b)))

    def not_(self, a: Any) -> Any:
        return z3.Not(truth(a))

    def and_(self, a: Any, b: Any) -> Any:
        return z3.And(truth(a), truth(b))

    def or_(self, a: Any, b: Any) -> Any:
        return z3.Or(truth(a), truth(b))

    def maximum(self, a: Any, b: Any) -> Any:
        if isinstance(a, Power):
            b = self._power(b)
            return Power(z3.If(a.z >= b.z, a.z, b.z))
        return Integer(z3.If(whole(a) >= whole(b), whole(a), whole(b)))

    def minimum(self, a: Any, b: Any) -> Any:
        if isinstance(a, Power):
            b = self._power(b)
            return Power(z3.If(a.z <= b.z, a.z, b.z))
        return Integer(z3.If(whole(a) <= whole(b), whole(a), whole(b)))

    def like(self, x: Any, held: Any) -> Any:
        return Integer(x) if isinstance(x, int) else x

    def f32(self, x: Any) -> Any:
        return x

    def log2(self, x: Any) -> Any:
        if isinstance(x, Magnitude):
            return Integer(x.z)
        return Integer(x.z * ONE_BIT)

    def pow2(self, e: Any) -> Power:
        return Power(whole(e))

    def _power(self, x: Any) -> Power:
        return x if isinstance(x, Power) else Power(exponent(x))


SYMBOLS = Symbols()

"""The little arithmetic that rules need, the same on Python numbers, NumPy, torch, JAX and Keras.

A rule is written once, against the ten functions of a namespace. `array-api-compat` was looked at
and does not serve: it has neither Python numbers nor Keras, and the array API has no exact log2.
Here exponents are read off a float's bits, so that every framework gives the same integer.

>>> ns = namespace(None)
>>> ns.log2(6.0), 2 * 256 + 128     # log2 in 1/256 of a bit, linear inside a binade: 6 = 2^2 * 1.5
(640, 640)
>>> ns.pow2(-3)
0.125
"""

from __future__ import annotations

import struct
import sys
from typing import Any

from .errors import SettingsError

ONE_BIT = 256  # log2 values are integers, in 1/256 of a bit
NOTHING = -127 * ONE_BIT  # log2 of zero; subnormal float32 numbers lie less than a bit above it
UNKNOWN = 128 * ONE_BIT  # log2 of inf and NaN, at least

_F32 = struct.Struct("<f")
_I32 = struct.Struct("<i")
_INF_BITS = 0x7F800000


class Scalars:
    """Python numbers: no array library needed."""

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b

    @staticmethod
    def not_(a: Any) -> Any:
        return not a

    @staticmethod
    def and_(a: Any, b: Any) -> Any:
        return a and b

    @staticmethod
    def or_(a: Any, b: Any) -> Any:
        return a or b

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return a if a >= b else b

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return a if a <= b else b

    @staticmethod
    def like(x: Any, held: Any) -> Any:
        """x with the type of what it replaces."""
        return type(held)(x)

    @staticmethod
    def f32(x: Any) -> Any:
        """The float32 nearest to x, so that Python's doubles take the same path as arrays."""
        return _F32.unpack(_F32.pack(x))[0]

    @staticmethod
    def log2(x: Any) -> Any:
        try:
            bits = _I32.unpack(_F32.pack(x))[0]
        except OverflowError:  # finite as a double, infinite as a float32
            bits = _INF_BITS
        return (bits // 2**15) + NOTHING

    @staticmethod
    def pow2(exponent: Any) -> Any:
        return 2.0**exponent


class Arrays:
    """0-d arrays of one library. Python bools among them (a flag known beforehand) cost no op."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return self.xp.where(condition, a, b)

    def not_(self, a: Any) -> Any:
        return not a if isinstance(a, bool) else self.xp.logical_not(a)

    def and_(self, a: Any, b: Any) -> Any:
        if isinstance(a, bool):
            return b if a else False
        if isinstance(b, bool):
            return a if b else False
        return self.xp.logical_and(a, b)

    def or_(self, a: Any, b: Any) -> Any:
        if isinstance(a, bool):
            return True if a else b
        if isinstance(b, bool):
            return True if b else a
        return self.xp.logical_or(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return self.xp.maximum(a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return self.xp.minimum(a, b)

    def like(self, x: Any, held: Any) -> Any:
        return self.xp.asarray(x, dtype=held.dtype)

    def f32(self, x: Any) -> Any:
        return self.xp.asarray(x, dtype=self.xp.float32)

    def log2(self, x: Any) -> Any:
        if isinstance(x, (int, float)):  # known beforehand: no op
            return Scalars.log2(x)
        return (self.bits(self.f32(x)) // 2**15) + NOTHING

    def pow2(self, exponent: Any) -> Any:
        return self.from_bits((exponent + 127) * 2**23)

    def bits(self, x: Any) -> Any:
        return x.view(self.xp.int32)

    def from_bits(self, bits: Any) -> Any:
        return bits.view(self.xp.float32)


class Torch(Arrays):
    """torch: maximum and minimum take no Python numbers, asarray would make tensors on the CPU."""

    def maximum(self, a: Any, b: Any) -> Any:
        return a.clamp(min=b) if self.xp.is_tensor(a) else b.clamp(min=a)

    def minimum(self, a: Any, b: Any) -> Any:
        return a.clamp(max=b) if self.xp.is_tensor(a) else b.clamp(max=a)

    def like(self, x: Any, held: Any) -> Any:
        return x.to(held.dtype) if self.xp.is_tensor(x) else self.xp.full_like(held, x)

    def f32(self, x: Any) -> Any:
        return x.to(self.xp.float32)


class Jax(Arrays):
    """jax.numpy: 0-d views go through `lax`, so that they trace."""

    def bits(self, x: Any) -> Any:
        return sys.modules["jax"].lax.bitcast_convert_type(x, self.xp.int32)

    def from_bits(self, bits: Any) -> Any:
        return sys.modules["jax"].lax.bitcast_convert_type(bits, self.xp.float32)


class Keras(Arrays):
    """keras.ops, whichever backend runs below it."""

    def like(self, x: Any, held: Any) -> Any:
        return self.xp.cast(x, "float32" if "float" in str(held.dtype) else "int32")

    def f32(self, x: Any) -> Any:
        return self.xp.cast(x, "float32")

    def bits(self, x: Any) -> Any:
        return self._view(x, "int32")

    def from_bits(self, bits: Any) -> Any:
        return self._view(bits, "float32")

    def _view(self, x: Any, dtype: str) -> Any:
        if sys.modules["keras"].backend.backend() == "tensorflow":
            return sys.modules["tensorflow"].bitcast(x, dtype)  # Keras 3.12 views no 0-d tensor
        return self.xp.view(x, dtype)


_KINDS: dict[str, type[Arrays]] = {
    "numpy": Arrays,
    "torch": Torch,
    "jax.numpy": Jax,
    "keras.ops": Keras,
}
_SCALARS = Scalars()
_made: dict[str, Arrays] = {}


def namespace(xp: Any = None) -> Any:
    """The namespace for `xp`: None (Python numbers), numpy, torch, jax.numpy or keras.ops; an
    object with these ten functions is one itself."""
    if xp is None:
        return _SCALARS
    name = getattr(xp, "__name__", repr(xp)).replace("keras.api.", "keras.")
    if name not in _made:
        if hasattr(xp, "pow2"):
            return xp
        if name not in _KINDS:
            raise SettingsError(
                f"xp={name} is not known; pass one of the modules {', '.join(_KINDS)}, "
                "or nothing for Python numbers"
            )
        _made[name] = _KINDS[name](xp)
    return _made[name]

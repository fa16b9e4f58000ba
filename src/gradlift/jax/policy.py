"""Which numbers are kept, computed with and returned in which format."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import SettingsError

_SHORT = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "full": "float32",
    "f64": "float64",
}
_PARTS = {"p": "params", "c": "compute", "o": "output"}
_NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "full", "float64": "f64"}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """Types of parameters, computation and output, as text or three types.

    Casts what is floating-point and leaves the rest alone. Not said: parameters are float32,
    computation is as they are, output is as computation.

    >>> policy = Policy("params=float32,compute=float16,output=float32")
    >>> policy == Policy(jnp.float32, jnp.float16, jnp.float32) == get_policy("c=f16,o=f32")
    True
    >>> policy.cast_to_compute({"w": jnp.ones(2), "n": jnp.arange(2)})["w"].dtype
    dtype('float16')
    >>> print(policy)
    p=full,c=f16,o=full
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def __init__(self, param_dtype: Any, compute_dtype: Any = None, output_dtype: Any = None):
        given = [param_dtype, compute_dtype, output_dtype]
        if isinstance(param_dtype, str) and compute_dtype is None and output_dtype is None:
            given = _parsed(param_dtype)
        elif None in (compute_dtype, output_dtype):
            raise SettingsError(
                "a policy is three types, for params, compute and output, or one text such as "
                "'params=float32,compute=float16,output=float32'"
            )
        for field, value in zip(dataclasses.fields(self), given, strict=True):
            object.__setattr__(self, field.name, _dtype(value))

    def cast_to_param(self, x: Any) -> Any:
        return _cast(x, self.param_dtype)

    def cast_to_compute(self, x: Any) -> Any:
        return _cast(x, self.compute_dtype)

    def cast_to_output(self, x: Any) -> Any:
        return _cast(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        return Policy(self.param_dtype, self.compute_dtype, output_dtype)

    def __str__(self) -> str:
        types = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return ",".join(f"{part}={_NAMES.get(d.name, d.name)}" for part, d in zip(_PARTS, types))


def get_policy(policy_name: str) -> Policy:
    """jmp's: a policy from its text, or one type for all three.

    >>> get_policy("p=f32,c=bf16,o=f32").compute_dtype, get_policy("half") == get_policy("float16")
    (dtype(bfloat16), True)
    """
    return Policy(policy_name)


def half_dtype() -> Any:
    """jmp's: bfloat16 on a TPU, else float16.

    >>> half_dtype()
    dtype('float16')
    """
    tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.dtype(jnp.bfloat16 if tpu else jnp.float16)


def cast_to_half(tree: Any) -> Any:
    """jmp's: floating-point leaves in `half_dtype()`.

    >>> cast_to_half([jnp.ones(1), 3])
    [Array([1.], dtype=float16), 3]
    """
    return _cast(tree, half_dtype())


def cast_to_full(tree: Any) -> Any:
    """jmp's: floating-point leaves in float32.

    >>> cast_to_full(jnp.ones(1, jnp.float16)).dtype
    dtype('float32')
    """
    return _cast(tree, jnp.dtype(jnp.float32))


def _parsed(text: str) -> list[Any]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if len(items) == 1 and "=" not in items[0]:
        return items * 3
    chosen: dict[str, str] = {"params": "float32"}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        part = _PARTS.get(name, name)
        if part not in _PARTS.values() or not equals:
            raise SettingsError(
                f"{text!r}: {item!r} is no part of a policy; write "
                "'params=float32,compute=float16,output=float32'"
            )
        chosen[part] = value
    compute = chosen.get("compute", chosen["params"])
    return [chosen["params"], compute, chosen.get("output", compute)]


def _dtype(what: Any) -> Any:
    if what == "half":
        return half_dtype()
    try:
        dtype = jnp.dtype(_SHORT.get(what, what) if isinstance(what, str) else what)
    except TypeError as error:
        raise SettingsError(
            f"Unknown dtype {what!r}: a policy is made of such as float16, bf16, half, full"
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise SettingsError(f"{what!r} is no floating-point type, such as float16 or float32")
    return dtype


def _cast(tree: Any, dtype: Any) -> Any:
    def one(x: Any) -> Any:
        floating = isinstance(x, (np.ndarray, jax.Array)) and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype) if floating else x

    return jax.tree.map(one, tree)

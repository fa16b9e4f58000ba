"""New where a step is applied, else old, to the bit; and where in the graph that is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..errors import MisuseError
from .finite_checking import name_of


def chosen(condition: Any, new: Any, old: Any) -> Any:
    """`new` where the condition holds, else `old`, leaf by leaf (+0.0 added to -0.0 would not be).

    >>> chosen(jnp.array(False), {"w": jnp.ones(2), "n": None}, {"w": jnp.zeros(2), "n": None})
    {'n': None, 'w': Array([0., 0.], dtype=float32)}
    """
    return jax.tree.map(lambda a, b: _one(condition, a, b), new, old)


def _one(condition: Any, new: Any, old: Any) -> Any:
    if getattr(new, "dtype", None) == jax.dtypes.float0 or not _is_array(new):
        return new
    return jnp.where(condition, new, old)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def gated(condition: Any, step: Callable[[], Any], old: Any) -> Any:
    """`step()` where the condition holds, else `old`, which is a tree of the same kind.

    Written as `chosen(condition, step(), old)` an optimizer would read its gradients twice: its
    new moments are not what is stored any more, so XLA computes them once to select from and once
    for the parameters, and cannot write them in place. Here each output is selected where it is
    computed, and whatever follows reads the selected value: the same one where the condition
    holds, and irrelevant where it does not.

    >>> jax.jit(lambda go, x: gated(go, lambda: x + 1, x))(True, jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    if not isinstance(condition, jax.core.Tracer):  # nothing is fused: nothing to gain
        new = step()
        _check(new, old)
        return chosen(condition, new, old)
    closed, shapes = jax.make_jaxpr(step, return_shape=True)()
    _check(shapes, old)
    before, tree = jax.tree.flatten(old)
    jaxpr = closed.jaxpr
    times = Counter(v for v in jaxpr.outvars if not isinstance(v, Literal))
    # One value in two places has two old ones: that is selected at the end.
    outputs = {
        var: leaf
        for var, leaf in zip(jaxpr.outvars, before, strict=True)
        if not isinstance(var, Literal) and times[var] == 1
    }
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    selected = set()

    def value(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for equation in jaxpr.eqns:
        params = equation.primitive.get_bind_params(equation.params)
        functions, params = params if isinstance(params, tuple) else ((), params)  # older JAX
        with equation.ctx.manager:
            out = equation.primitive.bind(*functions, *map(value, equation.invars), **params)
        out = out if equation.primitive.multiple_results else [out]
        for var, x in zip(equation.outvars, out, strict=True):
            if var in outputs:
                selected.add(var)
                x = _one(condition, x, outputs[var])
            values[var] = x
    after = []
    for var, leaf in zip(jaxpr.outvars, before, strict=True):
        done = not isinstance(var, Literal) and var in selected
        after.append(value(var) if done else _one(condition, value(var), leaf))
    return jax.tree.unflatten(tree, after)


def _check(new: Any, old: Any) -> None:
    """Same tree, same shapes, same types: else a skipped step could not keep what was there."""
    trees: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
    if trees[0] != trees[1]:
        raise MisuseError(
            "the optimizer gave back another tree than it was given, so a step could not be "
            f"skipped: {trees[0]} instead of {trees[1]}. Was its state made by init() from these "
            "parameters?"
        )
    after = jax.tree.leaves(new)
    for (path, was), now in zip(jax.tree_util.tree_leaves_with_path(old), after, strict=True):
        if not hasattr(was, "dtype") or not hasattr(now, "dtype"):
            continue
        if was.dtype != now.dtype or jnp.shape(was) != jnp.shape(now):
            raise MisuseError(
                f"the optimizer turned {name_of(path)} from {was.dtype}{list(jnp.shape(was))} "
                f"into {now.dtype}{list(jnp.shape(now))}, so a step could not be skipped. 16-bit "
                "parameters want gradlift.jax.master(optimizer), which keeps float32 masters and "
                "state"
            )

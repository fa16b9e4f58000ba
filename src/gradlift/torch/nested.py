"""Tensors inside nested tuples, lists, dicts and dataclasses, as modules take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, in order.

    >>> import torch
    >>> tensors({"a": (torch.ones(1), 2), "b": [torch.zeros(1)]})
    [tensor([1.]), tensor([0.])]
    """
    found: list[Tensor] = []
    seen: set[int] = set()  # a container may hold itself

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif (parts := _parts(value)) is not None and id(value) not in seen:
            seen.add(id(value))
            for part in parts.values():
                walk(part)
            seen.discard(id(value))

    walk(value)
    return found


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors in a value, each as one would write it.

    >>> import torch
    >>> [name for name, _ in named_tensors({"x": (torch.ones(1), torch.ones(1))}, "batch")]
    ["batch['x'][0]", "batch['x'][1]"]
    """
    seen: set[int] = set()  # a container may hold itself

    def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield name, value
        elif (parts := _parts(value)) is not None and id(value) not in seen:
            seen.add(id(value))
            fields = dataclasses.is_dataclass(value)
            for key, part in parts.items():
                yield from walk(part, f"{name}.{key}" if fields else f"{name}[{key!r}]")
            seen.discard(id(value))

    return walk(value, name)


def mapped(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """The value with f(tensor) for every tensor; what holds none that changed stays as it is.

    >>> import torch
    >>> mapped({"a": (torch.ones(1), 2)}, lambda t: t + 1)
    {'a': (tensor([2.]), 2)}
    """
    if isinstance(value, Tensor):
        return f(value)
    parts = _parts(value)
    if parts is None:
        return value
    new = {k: mapped(v, f) for k, v in parts.items()}
    if all(new[k] is v for k, v in parts.items()):
        return value
    if isinstance(value, (list, tuple)):
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*new.values()) if named else type(value)(new.values())
    other = copy.copy(value)  # keeps the type, and what a subclass has besides
    for k, v in new.items():
        if isinstance(value, dict):
            other[k] = v
        else:
            object.__setattr__(other, k, v)
    return other


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, index or field; None of anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None

"""O1's casts: torch's autocast in a model's forward, and functions with a type of their own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import SettingsError
from ..torch.masters.half_model import cast as _cast
from ..torch.nested import tensors
from .session import AMP

_DEVICES = ("cpu", "cuda", "xpu", "mps")


def in_autocast(model: nn.Module, outputs: torch.dtype = torch.float32) -> nn.Module:
    """Runs the model's forward in float16 autocast from now on, and gives `outputs` back.

    A copy of the model runs the copy's forward, and so does a replica of `nn.DataParallel`.
    """
    inner = vars(model).get("forward")
    if isinstance(inner, functools.partial) and inner.func is _forward:
        inner = inner.args[1]  # initialized before
    else:
        model.register_forward_pre_hook(_name_itself, with_kwargs=True)
    model.forward = functools.partial(_forward, model, inner, outputs)
    return model


def _name_itself(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A replica has the attributes of the model that it was made of, its `forward` among them.

    Only this call is changed: a script may have put a `forward` of its own around this one.
    """
    held = vars(module).get("forward")
    ours = isinstance(held, functools.partial) and held.func is _forward and held.args
    return (args, {**kwargs, "_amp_module": module}) if ours and ours[0] is not module else None


def _forward(
    model: nn.Module,
    inner: Callable[..., Any] | None,
    outputs: torch.dtype,
    *args: Any,
    _amp_module: nn.Module | None = None,
    **kwargs: Any,
) -> Any:
    model = model if _amp_module is None else _amp_module
    forward = inner or functools.partial(type(model).forward, model)
    if AMP.no_casts:
        return forward(*args, **kwargs)
    args, kwargs = in_single((args, kwargs))
    with torch.autocast(_device_of(model, args, kwargs), torch.float16):
        result = forward(*args, **kwargs)
    return _cast(result, outputs)


def in_single(given: Any) -> Any:
    """float32 for every other float type among a model's inputs."""
    other = any(x.dtype is not torch.float32 for x in tensors(given) if x.is_floating_point())
    return _cast(given, torch.float32) if other else given


def _device_of(model: nn.Module, args: Any, kwargs: Any) -> str:
    return next((x.device.type for x in chain(model.parameters(), tensors((args, kwargs)))), "cpu")


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Nothing is cast in here: neither by autocast, nor by registered functions.

    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Sequential(nn.Linear(2, 1)), opt_level="O1")
    >>> model[0].register_forward_hook(lambda module, args, out: print(out.dtype)) and None
    >>> x = model(torch.ones(1, 2))
    torch.float16
    >>> with disable_casts():
    ...     x = model(torch.ones(1, 2))
    torch.float32
    """
    AMP.paused += 1
    try:
        with _in_float32():
            yield
    finally:
        AMP.paused -= 1


# Functions


def half_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `fn` its float arguments in float16, under O1.

    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> half_function(torch.add)(torch.ones(1), torch.ones(1))
    tensor([2.], dtype=torch.float16)
    """
    return _casting(fn, lambda given: _cast(given, torch.float16))


def float_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fn` in float32, under O1: its arguments, and all that it computes from them.

    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> float_function(torch.add)(torch.ones(1).half(), torch.ones(1).half())
    tensor([2.])
    """
    return _casting(fn, lambda given: _cast(given, torch.float32), _in_float32)


def promote_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `fn` all its float arguments in the widest type among them, under O1.

    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> promote_function(torch.dot)(torch.ones(1), torch.ones(1).half())
    tensor(1.)
    """
    return _casting(fn, _promoted)


def register_half_function(module: Any, name: str) -> None:
    """Puts `half_function(module.name)` in its place.

    >>> import types
    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> mine = types.SimpleNamespace(add=torch.add)
    >>> register_half_function(mine, "add")
    >>> mine.add(torch.ones(1), 1.0).dtype
    torch.float16
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Puts `float_function(module.name)` in its place.

    >>> import types
    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> mine = types.SimpleNamespace(add=torch.add)
    >>> register_float_function(mine, "add")
    >>> mine.add(torch.ones(1).half(), 1.0).dtype
    torch.float32
    """
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Puts `promote_function(module.name)` in its place.

    >>> import types
    >>> from gradlift.apex import amp
    >>> model = amp.initialize(nn.Linear(2, 1), opt_level="O1")
    >>> mine = types.SimpleNamespace(dot=torch.dot)
    >>> register_promote_function(mine, "dot")
    >>> mine.dot(torch.ones(1), torch.ones(1).half()).dtype
    torch.float32
    """
    _register(module, name, promote_function)


def _casting(
    fn: Callable[..., Any],
    cast: Callable[[Any], Any],
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def casting(*args: Any, **kwargs: Any) -> Any:
        if not AMP.casting:
            return fn(*args, **kwargs)
        args, kwargs = cast((args, kwargs))
        with around():
            return fn(*args, **kwargs)

    casting._amp_casts = fn  # type: ignore[attr-defined]
    return casting


def _promoted(given: Any) -> Any:
    dtypes = [x.dtype for x in tensors(given) if x.is_floating_point()]
    return _cast(given, functools.reduce(torch.promote_types, dtypes)) if dtypes else given


def _register(module: Any, name: str, casting: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        raise SettingsError(f"{getattr(module, '__name__', module)} has no function {name!r}")
    fn = getattr(module, name)
    setattr(module, name, casting(getattr(fn, "_amp_casts", fn)))  # the last one counts
